// A program's history beside its code. No request is made, and a model's texts are only ever set as text.
// view.py describes the data; lanes.py and drawing.py do the same in Python.

const OPS = { P: "placeholder", G: "get_attr", F: "call_function", ".": "call_method", M: "call_module", O: "output" };
const WORDS = { "+": "created", "-": "erased", "~": "changed" }, KIND = { "+": "plus", "-": "minus", "~": "tilde" };
const sign = (mark) => (mark === "-" ? "−" : mark);
const LANE = 18, LANES = 14, FLAT = 300, OPENED = 100;

// h("div.name", {attribute: value}, kids...): text goes in as text.
const attrs = (element, values) => {
	for (const [key, value] of Object.entries(values))
		if ((value ?? false) === false) element.removeAttribute(key);
		else element.setAttribute(key, value === true ? "" : value);
	return element;
};
const add = (element, ...kids) => {
	for (const kid of kids.flat(9))
		if (typeof kid === "string" || kid instanceof Node) element.append(kid);
		else if (kid) attrs(element, kid);
	return element;
};
const h = (spec, ...kids) => {
	const [tag, ...names] = spec.split("."), element = add(document.createElement(tag), kids);
	element.className = names.join(" ");
	// Notebook 7 takes the arrow keys from any focusable element that does not say this.
	if (element.tabIndex >= 0) element.dataset.lmSuppressShortcuts = "true";
	return element;
};
const fill = (element, ...kids) => {
	element.replaceChildren();
	return add(element, kids);
};
const on = (element, type, run) => element.addEventListener(type, run);
const flag = (element, name, is) => element.classList.toggle(name, is);
const svg = (tag, ...kids) => add(document.createElementNS("http://www.w3.org/2000/svg", tag), kids);
const plural = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;
const clamp = (low, value, high) => Math.max(low, Math.min(high, value));
const button = (name, text, label, run) => {
	const element = h(`button.${name}`, { "aria-label": label, title: label }, text);
	on(element, "click", run);
	return element;
};
const tool = (text, label, run) => button("f-b", text, label, run);
const short = (n, unit) => {
	for (const [prefix, size] of [["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3], ["", 0]])
		if (Math.abs(n) >= size) return `${+(n / (size || 1)).toPrecision(3)} ${prefix}${unit}`.trim();
};
const elide = (text, room) => {
	if (text.length <= room) return text;
	const tail = Math.max(0, Math.floor((room - 1) * 0.4));
	return text.slice(0, Math.max(1, room - 1 - tail)) + "…" + (tail ? text.slice(-tail) : "");
};
const WORD =
	/("[^"]*"|'[^']*')|(self(?:\.\w+)+)|(?<!\.)\b(def|return|self|None|True|False)\b|(\b\d[\w.]*)|([^\W\d]\w*)/g;
// Of a long line the path to a module or an operator goes first.
const PATH = / = (getattr\(.*\)(?=\.\w+\()|getattr\(.*(?=, "\w+"\)\()|torch\.ops\.\w+(?=\.))/;
const brief = (text, room) =>
	elide(text.length > room ? text.replace(PATH, " = …") : text, room);
const isGroup = (kid) => typeof kid === "object";
const alive = (slots) => slots.filter((slot) => slot.st === 0);
const size = ({ first, last }) => Math.max(0, last - first + 1);
const key = (place) => `${place[3]}:${place[1]}`;

// Pack the values of a frame into lanes: the same sweep as lanes.py. A null input list only holds a place.
export function layout(inputs, leaf, limit = LANES) {
	const end = inputs.map((_, row) => row), back = [];
	inputs.forEach((read, row) => {
		for (const producer of read || []) if (producer < row) end[producer] = row; else back.push([row, producer]);
	});
	const pack = (chosen, first) => {
		const lane = inputs.map(() => -1), free = [];
		let width = first, unread = -1;
		const release = (value) => { free.push(value); free.sort((a, b) => b - a); };
		inputs.forEach((read, row) => {
			if (unread >= 0) release(unread);
			unread = -1;
			if (!read) return;
			const ending = new Set(read.filter((p) => p < row && end[p] === row && lane[p] >= 0).map((p) => lane[p]));
			if (!chosen || chosen[row]) {
				lane[row] = ending.size ? Math.min(...ending) : free.length ? free.pop() : width++;
				ending.delete(lane[row]);
				if (end[row] === row) unread = lane[row];
			}
			ending.forEach(release);
		});
		return [lane, width];
	};
	let [lane, width] = pack(null, 0);
	if (width > limit && leaf && leaf.includes(true)) {
		const [computed, inner] = pack(leaf.map((is) => !is), 0), [given, all] = pack(leaf, inner);
		lane = computed.map((value, row) => (value >= 0 ? value : given[row]));
		width = all;
	}
	return { lane, end, width, back };
}

// What the timeline says, replayed: the rows of any step, each in its slot.
export class Story {
	constructor(data) {
		const place = (k) => data.places[k];
		this.data = data;
		this.steps = [null, ...data.steps.map((step) => ({ m: [], ...step, w: step.w.map(place) }))];
		this.last = data.steps.length;
		this.rows = new Map();
		this.lines = new Map();
		this.trees = new Map();
		for (const [id, letter, name, line, target, ins, shape, path, source, from] of data.rows)
			this.rows.set(id, { id, path, source: source.map(place),
				past: [{ since: 0, letter, name, line, target, ins, shape, from }] });
		data.steps.forEach((step, k) => {
			for (const [id, change] of step.ch || []) {
				const { past } = this.rows.get(id);
				past.push({ ...past.at(-1), ...change, since: k + 1 });
			}
		});
	}

	at(id, step) {
		const { past } = this.rows.get(id);
		let k = past.length - 1;
		while (k > 0 && past[k].since > step) k--;
		return past[k];
	}

	// A line comes as pieces: text, and row numbers where names stand.
	line(id, step) {
		return this.at(id, step).line.map((part) => (typeof part === "number" ? this.at(part, step).name : part)).join("");
	}

	pass(step) { return step ? this.steps[step].s : this.last ? this.steps[1].s : 0; }

	span(s) { return this.data.passes[s] || { first: 1, last: 0 }; }

	// The lines of one pass: every row that lives in it at any time, in an order that no step changes.
	slots(s, p) {
		const name = `${s}/${p}`, { programs, passes } = this.data;
		if (!this.lines.has(name)) {
			const rows = (passes[s] && passes[s].slots[p]) || (programs[p] ? programs[p].rows : []);
			this.lines.set(name, rows.map((one) => [one].flat()).map(([id, born = -1, died]) =>
				({ id, born, died: died || Infinity })));
		}
		return this.lines.get(name);
	}

	// A pass that returned another program: the rows of both.
	result(i) {
		return this.steps[i].rows.map(([id, what]) =>
			({ id, born: what === 1 ? i : -1, died: what === 2 ? i : Infinity, inner: what === 3 }));
	}

	// Rows of step i: st 0 live, 1 ghost, 2 not created yet; mark + - ~, strong when it is this step's.
	frame(i) {
		const step = this.steps[i], s = this.pass(i), p = step ? step.p : 0, touched = new Map();
		const isResult = step && step.k === "result", list = isResult ? this.result(i) : this.slots(s, p);
		for (let j = this.span(s).first; j <= i; j++) for (const id of this.steps[j].m) touched.set(id, j);
		const slots = list.map(({ id, born, died, inner }) => {
			const st = i < born ? 2 : i >= died ? 1 : 0, at = touched.get(id), made = born > 0 && (born === i || at !== i);
			const [mark, strong] = st === 1 ? ["-", died === i] : st ? ["", false] : made ? ["+", born === i]
				: [at ? "~" : "", at === i];
			return { id, st, inner, mark, strong };
		});
		return { i, s, p, slots, key: isResult ? `r${i}` : `${s}/${p}` };
	}

	// Modules as groups of neighbouring rows; equal neighbours become one repeat.
	tree(frame) {
		if (this.trees.has(frame.key)) return this.trees.get(frame.key);
		const { paths } = this.data, root = { kids: [], key: "", path: -1 }, open = [root], seen = new Map();
		frame.slots.forEach((slot, index) => {
			const modules = [];
			for (let at = this.rows.get(slot.id).path; at >= 0; at = paths[at][0]) modules.unshift(at);
			let d = 0;
			while (d < modules.length && open[d + 1]?.path === modules[d]) d++;
			open.length = d + 1;
			for (; d < modules.length; d++) {
				const path = modules[d], n = (seen.get(path) || 0) + 1;
				const group = { path, kids: [], key: `${path}#${n}`, up: open[d] };
				seen.set(path, n);
				open[d].kids.push(group);
				open.push(group);
			}
			open[d].kids.push(index);
		});
		const groups = [root], known = new Map();
		const number = (text) => known.get(text) ?? known.set(text, `${known.size}`).get(text);
		for (const group of groups) groups.push(...group.kids.filter(isGroup));
		for (const group of [...groups].reverse()) {
			group.sign = group.path < 0 ? "" : String(paths[group.path][2]);
			for (const kid of group.kids)
				group.sign = number(`${group.sign}|${isGroup(kid) ? kid.sign : this.sign(frame.slots[kid].id)}`);
			group.size = group.kids.reduce((sum, { size = 1 }) => sum + size, 0);
			group.kids = group.kids.flatMap((kid) => (isGroup(kid) && kid.size < 2 ? kid.kids : [kid]));
			const [only] = group.kids;
			if (group.kids.length === 1 && isGroup(only) && group.up)
				Object.assign(group, { kids: only.kids, path: only.path });
		}
		for (const group of groups) {
			const kids = [];
			for (const kid of group.kids) {
				const run = kids.at(-1);
				if (isGroup(kid) && isGroup(run) && run.sign === kid.sign) {
					if (!run.times) kids[kids.length - 1] = { ...run, kids: [run], key: `x${run.key}`, times: 1 };
					const repeat = kids.at(-1);
					repeat.kids.push(kid);
					repeat.size += kid.size;
					repeat.times++;
				} else kids.push(kid);
			}
			group.kids = kids;
		}
		const home = new Map(), opened = new Set(), walk = [root];
		for (const group of walk)
			for (const kid of group.kids) {
				if (isGroup(kid)) walk.push(Object.assign(kid, { up: group }));
				else home.set(kid, group);
			}
		const given = ({ path, size }) => size > 12 && Object.values(OPS).includes(paths[path][2]);
		let shown = root.kids.length, level = root.kids.filter((kid) => isGroup(kid) && !given(kid));
		while (level.length) {
			shown += level.flatMap((group) => group.kids).length - level.length;
			if (frame.slots.length > FLAT && shown > OPENED) break;
			for (const group of level) opened.add(group.key);
			level = level.flatMap((group) => group.kids.filter(isGroup));
		}
		const tree = { root, home, opened, groups: walk.slice(1) };
		this.trees.set(frame.key, tree);
		return tree;
	}

	sign(id) {
		const { letter, target } = this.rows.get(id).past[0];
		return letter + ("MG".includes(letter) ? target.slice(target.lastIndexOf(".") + 1) : target);
	}
}

export class Viewer {
	constructor(root, data, host) {
		Object.assign(this, { root, data, host, story: new Story(data), step: 0, row: null, folds: new Map(),
			columns: new Set(data.metrics.filter(({ on }) => on)), hits: [], query: "",
			id: `fxl${Math.random().toString(36).slice(2, 8)}` });
		this.style("--shape", data.width);
		this.style("--rows", data.rows.length);
		this.build();
		this.theme();
		const heed = { wall: (on) => this.wall(!!on), predict: (on) => this.predict(!!on), step: (to) =>
			this.go(+to || 0), selection: (name) => this.pick(name || ""), notes: () => this.tell() };
		for (const [name, run] of Object.entries(heed)) {
			run(host.get(name));
			host.on(name, () => run(host.get(name)));
		}
		host.on("picture", (reply) => this.picture(reply));
		this.sizes = new ResizeObserver(() => this.resize());
		this.sizes.observe(this.grid);
		root.dataset.ready = "true";
	}

	style(name, value) { this.root.style.setProperty(name, value); }

	build() {
		const d = this.data, { last } = this.story;
		this.chips = d.passes.map((pass, s) =>
			button(`f-chip${pass.quiet ? ".quiet" : ""}${pass.bad ? ".bad" : ""}`, h("span"),
				`pass ${pass.name}, ${plural(size(pass), "step")}${pass.bad && `: ${pass.bad}`}`,
				() => this.openPass(s)));
		this.search = h("input.f-search", { type: "search", placeholder: "/ search", spellcheck: "false",
			"aria-label": "search" });
		on(this.search, "input", () => this.find(this.search.value, 0));
		const boxes = d.metrics.map((metric) => {
			const box = h("input", { type: "checkbox", title: metric.tip, checked: metric.on });
			on(box, "change", () => { this.columns[box.checked ? "add" : "delete"](metric); this.show(); });
			return h("label", box, metric.title);
		});
		this.strips = d.passes.map(({ strip }) => h("div", strip.map((text) => h("span", text))));
		const pane = (name, values) => (this[name] = h(`div.f-${name}`, values));
		const tools = h("div.f-tools", this.search, (this.found = h("span.f-found", { role: "status" })),
			(this.tabButton = tool("picture", "the classic box-and-arrow picture", () => this.picture())),
			h("details.f-menu", { hidden: !boxes.length }, h("summary.f-b", "columns"), h("div.f-choices", boxes)),
			tool("fold", "fold all modules", () => this.foldAll(false)),
			tool("unfold", "unfold all modules", () => this.foldAll(true)),
			(this.predictButton = tool("predict", "predict the next edit (P)", () => this.predict(!this.guessing))),
			tool("wall", "wall mode (W)", () => this.wall(!this.isWall)),
			tool("?", "keys (?)", () => this.help()));
		this.tabButton.hidden = !this.host.ask;
		this.lanes = svg("svg", { class: "f-lanes", "aria-hidden": "true" });
		this.canvas = h("div.f-canvas", { role: "rowgroup" }, this.lanes);
		this.grid = h("div.f-grid", { tabindex: 0, role: "treegrid", "aria-readonly": "true",
			"aria-label": `${elide(d.title, 80)}: nodes and code` }, this.canvas);
		this.slider = h("input.f-slider", { type: "range", min: 0, max: last, step: 1, "aria-label": "step" });
		on(this.slider, "input", () => this.go(+this.slider.value));
		const ticks = d.passes.filter((pass) => pass.first > 1 && !pass.quiet).map(({ first }) =>
			h("i", { style: `left:${(100 * (first - 1)) / last}%` }));
		this.code = button("f-code", "", "copy the code of this step", () => {
			if (this.step) navigator.clipboard?.writeText(this.story.steps[this.step].c).catch(() => {});
		});
		this.helpBox = h("div.f-help", { role: "dialog", "aria-label": "keys", hidden: true }, h("b", "Keys"),
			h("dl", d.keys.map(([name, what]) => [h("dt", name), h("dd", what)])),
				tool("close", "close", () => this.help()));
		this.split = h("div.f-split", { role: "separator", tabindex: 0, "aria-orientation": "vertical",
			"aria-label": "width of the source", title: "drag, or Left and Right" });
		on(this.split, "pointerdown", ({ pointerId }) => this.split.setPointerCapture(pointerId));
		on(this.split, "pointermove", ({ buttons, clientX }) => buttons && this.divide(clientX));
		add(this.root,
			h("div.f-top", h("b.f-title", elide(d.title, 80)), h("div.f-chips", this.chips), pane("counts"), tools),
			pane("strip", [{ hidden: !d.passes.some(({ strip }) => strip.length) }, this.strips]),
			h("div.f-main",
				h("div.f-left", pane("head"), pane("source"),
					h("div.f-say", pane("sentence", { "aria-live": "polite" }), pane("change"), pane("verdicts"),
						pane("guess"), pane("note")), pane("detail"), pane("userhead"), (this.user = h("div.f-source.f-user"))),
				this.split,
				h("div.f-right", pane("heads", { "aria-hidden": "true" }), this.grid, pane("pane", { hidden: true }))),
			h("div.f-legend", Object.entries(OPS).map(([letter, name]) => h("span", h("b", letter), ` ${name}`)),
				Object.keys(WORDS).map((mark) => h("span", h(`b.${KIND[mark]}`, sign(mark)), ` ${WORDS[mark]}`)),
				h("span.f-pale", "pale: earlier"), h("span.f-arc", "dotted: came from"), (this.state = h("b"))),
			h("div.f-foot", button("f-nav", "◀", "one step back (Left)", () => this.go(this.step - 1)),
				button("f-nav", "▶", "one step on (Right)", () => this.go(this.step + 1)),
				h("div.f-track", h("div.f-ticks", ticks), this.slider), this.code), this.helpBox);
		on(this.root, "keydown", (event) => this.press(event));
		on(this.grid, "scroll", () => this.repaint());
		on(this.grid, "click", (event) => this.click(event));
		const near = ({ target }, name) => target.closest(`[data-${name}]`)?.dataset[name];
		on(this.root, "mouseover", (event) =>
			this.light(near(event, "line") ?? this.items[near(event, "index")] ?? null));
		on(this.root, "mouseleave", () => this.light(null));
		on(this.root, "click", (event) => near(event, "line") && this.chooseLine(near(event, "line")));
	}

	divide(x) {
		const { left, width } = this.root.getBoundingClientRect();
		this.style("--left", `${clamp(15, (100 * (x - left)) / width, 75)}%`);
	}

	// Light and dark follow JupyterLab and Notebook 7, VS Code, Colab, else the system.
	theme() {
		const media = matchMedia("(prefers-color-scheme: dark)"), { body, documentElement: page } = document;
		const read = () => {
			const lab = body.dataset.jpThemeLight, code = body.dataset.vscodeThemeKind, colab = page.getAttribute("theme");
			const dark = lab ? lab === "false" : code ? !code.includes("light") : colab ? colab === "dark" : media.matches;
			this.root.dataset.theme = dark ? "dark" : "light";
		};
		const watch = new MutationObserver(read);
		for (const one of [body, page]) watch.observe(one, { attributes: true });
		media.onchange = read;
		read();
		this.close = () => {
			watch.disconnect();
			this.sizes.disconnect();
			media.onchange = null;
		};
	}

	go(step) {
		step = clamp(0, step, this.story.last);
		if (step === this.step && this.frame) return;
		Object.assign(this, { step, judged: null, opened: null });
		this.say("");
		this.host.set("step", step);
		this.show(this.frame || this.story.steps[step]?.k !== "create");
		if (!this.pane.hidden) this.picture("again");
	}

	goPass(by) {
		const ends = [0, ...this.data.passes.filter(({ quiet }) => !quiet).map(({ last }) => last)];
		this.go((by > 0 ? ends.find((at) => at > this.step) : ends.findLast((at) => at < this.step)) ?? this.step);
	}

	openPass(s) {
		const pass = this.data.passes[s];
		if (!pass.quiet) this.go(this.step === pass.first ? pass.last : pass.first);
		this.opened = pass;
		this.tell();
		this.focus();
	}

	focus() { this.grid.focus({ preventScroll: true }); }

	// The next change of the selected row, or of anything.
	nextChange(by) {
		for (let i = this.step + by; i >= 1 && i <= this.story.last; i += by) {
			const { m, r, k } = this.story.steps[i];
			if (k !== "value" && (this.row === null || r === this.row || m.includes(this.row))) { this.go(i); return; }
		}
		this.say(`no ${by > 0 ? "later" : "earlier"} change ${this.row === null ? "" : `of ${this.selected()}`}`);
	}

	say(text) { this.found.textContent = text; }

	now(id) { return this.story.at(id, this.step); }

	info(id) { return this.story.rows.get(id); }

	spot(id) { return this.place.get(id) ?? this.ghosts.get(id); }

	outer() { return alive(this.frame.slots).filter((slot) => !slot.inner).map((slot) => slot.id); }

	nameOf(id) { return this.now(id).name; }

	selected() { return this.row === null ? "" : this.nameOf(this.row); }

	pick(name) {
		if (name === this.selected()) return;
		const named = this.frame.slots.filter(({ id }) => this.nameOf(id) === name), slot = alive(named)[0] || named[0];
		this.select(slot ? slot.id : null, false);
	}

	select(row, tell = true, group = null) {
		Object.assign(this, { row, group });
		if (tell) this.host.set("selection", this.selected());
		this.reveal(this.chosen());
		this.paint();
		this.tell();
	}

	show(follow) {
		const { story } = this, frame = (this.frame = story.frame(this.step)), tree = (this.tree = story.tree(frame));
		const closed = this.closed || this.guessing, items = (this.items = []), stack = [[tree.root, 0]];
		const shown = (slot) => !closed || slot.st === 0 || (slot.st === 1 && slot.strong);
		while (stack.length) {
			const top = stack.at(-1), kid = top[0].kids[top[1]++], level = stack.length;
			if (kid === undefined) stack.pop();
			else if (!isGroup(kid)) { if (shown(frame.slots[kid])) items.push({ slots: [frame.slots[kid]], level }); }
			else if (this.folds.get(kid.key) ?? tree.opened.has(kid.key)) stack.push([kid, 0]);
			else {
				const slots = this.inside(kid).map((k) => frame.slots[k]);
				if (slots.some(shown)) items.push({ group: kid, slots, level });
			}
		}
		this.place = new Map();
		this.ghosts = new Map();
		this.users = new Map();
		this.dangling = [];
		items.forEach(({ slots }, index) => {
			for (const { id, st } of slots) if (st < 2) (st ? this.ghosts : this.place).set(id, index);
		});
		this.inputs = items.map(({ slots, group }, index) => {
			const live = alive(slots), into = new Set();
			for (const { id } of live)
				for (const input of this.now(id).ins) {
					const from = this.place.get(input), list = this.users.get(input);
					if (list) list.push(id); else this.users.set(input, [id]);
					if (!(from >= 0)) this.dangling.push([index, this.ghosts.get(input)]);
					else if (from !== index || !group) into.add(from);
				}
			return live.length ? [...into] : null;
		});
		this.cap = this.root.clientWidth && this.root.clientWidth < 500 ? 5 : LANES;
		const leaf = items.map(({ slots, group }) => !group && "PG".includes(this.now(slots[0].id).letter));
		this.lane = layout(this.inputs, leaf, this.cap);
		this.given = this.outer().filter((id) => this.now(id).letter === "P");
		// The gutter only grows while a pass is stepped, so that the code does not shift.
		const wide = Math.min(this.cap, this.lane.width) + (this.ghosts.size ? 1 : 0),
			kept = `${frame.key}|${[...this.folds]}`;
		this.gutter = Math.max(wide, this.gutterKey === kept ? this.gutter : 2);
		this.gutterKey = kept;
		this.hits = this.matching();
		this.measure();
		if (follow) {
			const step = story.steps[this.step];
			const at = (step ? [step.r, ...step.m] : []).map((id) => this.spot(id));
			this.reveal(at.find((index) => index >= 0));
		}
		this.paint();
		this.chrome();
		this.tell();
	}

	inside(group) {
		const groups = [group];
		if (!group.all) for (const { kids } of groups) groups.push(...kids.filter(isGroup));
		return (group.all ??= groups.flatMap(({ kids }) => kids.filter((kid) => !isGroup(kid))).sort((a, b) => a - b));
	}

	foldAll(open) {
		for (const group of this.tree.groups) this.folds.set(group.key, open);
		this.show(true);
	}

	home(row) { return this.tree.home.get(this.frame.slots.findIndex(({ id }) => id === row)); }

	unfold(row) {
		for (let group = this.home(row); group?.key; group = group.up) this.folds.set(group.key, true);
		this.show();
	}

	// Enter opens the selected fold, or folds the selected row's module.
	toggle() {
		const { group } = this, row = group ? this.frame.slots[this.inside(group)[0]].id : this.row,
			home = group || this.home(row);
		if (!home?.key) return;
		this.folds.set(home.key, !!group);
		if (group?.times) for (const kid of group.kids) this.folds.set(kid.key, this.folds.get(kid.key) ?? false);
		Object.assign(this, { row, group: null });
		this.show();
		const folded = this.items.findIndex((item) => item.group === home), at = folded < 0 ? this.place.get(row) : folded;
		if (at >= 0) this.choose(at);
	}

	choose(index) {
		const { group, slots } = this.items[index];
		this.select(group ? null : slots[0].id, true, group);
	}

	chosen() {
		if (this.group) return this.items.findIndex((item) => item.group === this.group);
		const at = this.spot(this.row) ?? -1;
		return at >= 0 && !this.items[at].group ? at : -1;
	}

	along(by) {
		let at = this.chosen();
		if (at < 0) at = by > 0 ? Math.floor(this.grid.scrollTop / this.tall) - 1 : this.items.length;
		do at += by; while (this.items[at] && !this.items[at].group && this.items[at].slots[0].st > 1);
		if (this.items[at]) this.choose(at);
	}

	// To the first input or user; with Shift, to the next.
	toward(what, ids, again) {
		const places = (ids || []).map((id) => this.place.get(id)).filter((at) => at >= 0);
		if (again && this.hop?.what === what && this.hop.to === this.row) this.hop.k++;
		else this.hop = { what, k: 0, all: [...new Set(places)] };
		const { all, k } = this.hop, n = all.length;
		if (!n) { this.say(what === "i" ? "reads nothing" : "read by nothing"); return; }
		this.choose(all[k % n]);
		this.hop.to = this.row;
		this.say(n > 1 ? `${(k % n) + 1} of ${n} (Shift: next)` : "");
	}

	measure() {
		this.tall = this.isWall ? 40 : 24;
		this.style("--row", this.tall);
		if (!this.wide) {
			const probe = this.canvas.appendChild(h("span.f-probe", "0".repeat(50)));
			this.wide = probe.getBoundingClientRect().width / 50;
			probe.remove();
		}
		this.canvas.style.height = `${this.items.length * this.tall}px`;
		this.heads.style.paddingRight = `${this.grid.offsetWidth - this.grid.clientWidth}px`;
		this.style("--gutter", `${(this.gutter + 1) * LANE}px`);
	}

	resize() {
		this.wide = 0;
		if (this.frame) this.show();
	}

	reveal(at) {
		const { grid, tall } = this, height = grid.clientHeight, y = at * tall - grid.scrollTop;
		if (at >= 0 && height && (y < tall || y > height - 2 * tall)) grid.scrollTop = Math.max(0, at * tall - height / 2);
	}

	paint() {
		if (!this.items) return;
		const { grid, tall } = this, top = grid.scrollTop, from = Math.max(0, Math.floor(top / tall) - 4);
		const to = Math.min(this.items.length, Math.ceil((top + (grid.clientHeight || 400)) / tall) + 4);
		this.around = new Map();
		if (this.place.has(this.row)) {
			for (const id of this.now(this.row).ins) this.around.set(id, "in");
			for (const id of this.users.get(this.row) || []) this.around.set(id, this.around.has(id) ? "both" : "out");
		}
		const { data } = this, at = this.chosen(), letter = this.wide || 8, shapes = (data.width + 2) * letter;
		const columns = this.root.clientWidth < 560 || this.isWall ? 0 : shapes + this.columns.size * 84;
		const spare = (this.canvas.clientWidth || 600) - (this.gutter + 1) * LANE - 28 - columns;
		this.room = Math.max(12, Math.floor(spare / letter));
		// A row that says what it said stays in place: a new one costs a layout.
		const old = {};
		for (const row of [...this.canvas.children].slice(1)) {
			const { index } = row.dataset;
			if (index < from || index >= to) row.remove(); else old[index] = row;
		}
		for (let index = from, above = this.lanes; index < to; index++) {
			const row = this.paintRow(index, index === at), was = old[index];
			if (!was?.isEqualNode(row)) { above.after(row); was?.remove(); }
			above = above.nextSibling;
		}
		this.draw(from, to, at);
		attrs(grid, { "aria-rowcount": this.items.length,
			"aria-activedescendant": at >= from && at < to ? `${this.id}-${at}` : null });
	}

	repaint() {
		this.paint();
		this.lightRows();
	}

	lineOf({ id, st, inner }) {
		const text = this.story.line(id, this.step), start = "def forward(self, ", { given } = this;
		if (this.now(id).letter !== "P" || st || inner) return (inner ? "    " : "") + text;
		return (given[0] === id ? start : " ".repeat(start.length)) + text + (given.at(-1) === id ? "):" : ",");
	}

	paintRow(index, picked) {
		const { group, slots, level } = this.items[index], [slot] = slots;
		const cell = (name, ...kids) => h(`div.f-${name}`, { role: "gridcell" }, kids);
		const near = slots.map(({ id }) => this.around.get(id)).find(Boolean);
		const badge = near && h(`span.f-badge.${near}`, { in: "◂ input", out: "▸ reader", both: "◂▸ both" }[near]);
		const row = h("div.f-row", { role: "row", id: `${this.id}-${index}`, "data-index": index,
			style: `transform:translateY(${index * this.tall}px)`, "aria-rowindex": index + 1, "aria-level": level,
			"aria-selected": String(picked) }, cell("gap"));
		const mark = (...names) => row.classList.add(...names);
		if (index % 2) mark("odd");
		if (picked) mark("selected");
		if (this.hits.includes(index)) mark("hit");
		if (group) {
			const [, name, type] = this.data.paths[group.path], { times } = group;
			const sums = Object.keys(WORDS).flatMap((mark) => [true, false].map((strong) => {
				const n = slots.filter((one) => one.mark === mark && one.strong === strong).length;
				return n > 0 && h(`${strong ? "b" : "span"}.${KIND[mark]}`, `${sign(mark)}${n} `);
			}));
			const said = `${type}${times ? ` ×${times}` : ""}`, count = `${plural(alive(slots).length, "row")} folded`;
			mark("fold");
			return add(row, { "aria-expanded": "false", "aria-label": `${name} ${said}, ${count}` }, cell("mark"),
				cell("line", "▸ ", h("span.nm", elide(name, Math.max(12, this.room - 40))), ` ${said}`,
					h("span.dim", `  ${count} `), sums, badge), cell("shape"));
		}
		const now = this.now(slot.id), empty = slot.st === 2, text = empty ? "" : this.lineOf(slot),
			room = this.room - (near ? 10 : 0);
		mark(["live", "ghost", "empty"][slot.st]);
		if (this.step && slot.id === this.story.steps[this.step].r) mark("about");
		if (slot.mark) mark(KIND[slot.mark], slot.strong ? "strong" : "faint");
		if (picked && text.length > room) mark("full");
		add(row, cell("mark", sign(slot.mark)), cell("line", empty && !this.step && !index ? "▶ or Right: first step"
			: this.tokens(picked ? text : brief(text, room), now), badge),
			cell("shape", empty ? "" : elide(now.shape, this.data.width)));
		for (const { values, max, unit } of this.columns) {
			const value = values[slot.id], known = value !== undefined && slot.st === 0;
			const bar = h("i", { style: `width:${clamp(1, (100 * value) / max, 100)}%` });
			row.append(cell("metric", known && [bar, h("span", short(value, unit))]));
		}
		if (empty) return add(row, { "aria-label": "a row that a later step makes" });
		const names = (list) => (list || []).map((id) => this.nameOf(id)).join(", ") || "nothing";
		const what = slot.mark ? `, ${WORDS[slot.mark]} ${slot.strong ? "in this step" : "earlier"}` : "";
		const told = slot.st ? `read ${names(now.ins)}`
			: `reads ${names(now.ins)}; read by ${names(this.users.get(slot.id))}`;
		return add(row, { "aria-label": `${now.name}, ${OPS[now.letter]}${what}: ${text.trim()} ${now.shape}; ${told}` });
	}

	tokens(text, now) {
		const out = h("span"), known = new Set(now.ins.map((id) => this.nameOf(id)));
		let last = 0, named = false;
		for (const [all, string, path, word, number, name] of (text.length > 4000 ? "" : text).matchAll(WORD)) {
			const at = text.indexOf(all, last), own = name === now.name && !named;
			const kind = string ? "st" : path ? "tg" : word ? "kw" : number ? "nu" : own ? "nm" : known.has(name) ? "rf" : "";
			named = named || own;
			add(out, text.slice(last, at), kind ? h(`span.${kind}`, all) : all);
			last = at + all.length;
		}
		return add(out, text.slice(last));
	}

	draw(from, to, selected) {
		const { tall, lane: { lane, end, back, width }, inputs, cap } = this, kids = [], r = Math.min(8, tall / 2 - 3);
		const x = (value) => LANE * (Math.min(value, cap) + 0.75), y = (row) => (row + 0.5) * tall,
			aside = x(Math.min(width, cap)) + 2;
		const tone = (row) => (lane[row] >= cap ? "many" : lane[row] % 6);
		const path = (d, name, hue) => kids.push(svg("path", { d, class: `${name} ${hue === "many" ? hue : ""}`,
			style: hue >= 0 && `stroke:var(--t${hue})` }));
		const arc = (row, other, bow, name) => {
			const start = inputs[other] ? x(lane[other]) : aside, stop = x(lane[row]), a = y(other), b = y(row);
			const tilt = row === other ? tall : 0;
			bow += tilt;
			path(`M${start} ${a}C${start + bow} ${a - tilt} ${stop + bow} ${b + tilt} ${stop} ${b}`, name);
		};
		for (let row = 0; row < to; row++) {
			if (!inputs[row]) continue;
			const stop = Math.max(y(row), y(end[row]) - (lane[end[row]] === lane[row] ? 0 : tall * 0.8));
			if (end[row] > row && end[row] >= from)
				path(`M${x(lane[row])} ${y(row)}V${stop}`, row === selected ? "out" : "", tone(row));
			for (const producer of row < from ? [] : inputs[row]) {
				const a = x(lane[producer]), b = x(lane[row]),
					name = producer === selected ? "out" : row === selected ? "in" : "";
				if (producer >= row) continue;
				if (a !== b) path(`M${a} ${y(row) - tall * 0.8}Q${a} ${y(row)} ${b} ${y(row)}`, name, tone(producer));
				else if (name === "in") path(`M${a} ${y(row) - tall}V${y(row)}`, name, tone(producer));
			}
		}
		for (const [row, other] of [...this.dangling, ...back])
			if (other >= 0 && Math.max(row, other) >= from && Math.min(row, other) < to) arc(row, other, 16, "bad");
		const here = this.place.get(this.row);
		for (const id of here >= 0 ? this.now(this.row).from : []) {
			const old = this.spot(id);
			if (old >= 0 && old !== here) arc(here, old, 22, "ribbon");
		}
		flag(this.root, "arcs", kids.some(({ classList: [name] }) => name === "ribbon"));
		for (let row = from; row < to; row++) {
			const { group, slots: [slot] } = this.items[row], ghost = !group && slot.st === 1,
				cx = ghost ? aside : x(lane[row]);
			if ((group && lane[row] < 0) || (!group && slot.st === 2)) continue;
			const letter = group ? (group.times ? "×" : "…") : this.now(slot.id).letter, name = ghost ? "ghost" : "";
			kids.push(svg("rect", { x: cx - r, y: y(row) - r, width: 2 * r, height: 2 * r, rx: group ? 3 : r,
				class: `g ${name}`, style: `--fill:var(--${group ? "P" : letter.replace(".", "D")})` }),
			svg("text", { x: cx, y: y(row), class: name }, letter));
		}
		attrs(this.lanes, { width: (this.gutter + 1) * LANE, height: this.items.length * tall }).replaceChildren(...kids);
	}

	// The left pane: line, sentence, verdicts, the selected row.
	tell() {
		const { data, story } = this, step = story.steps[this.step], span = step && data.passes[step.s];
		const isPass = span && span.kind === "pass", first = span || data.passes[0];
		const frames = step ? step.w : this.guessing || !data.opening ? [] : [data.opening];
		const level = frames[this.level] ? this.level : 0, quiet = this.opened?.quiet ? this.opened : null;
		this.head.hidden = !frames.length;
		fill(this.head, h("span", `${first && first.kind !== "pass" ? "model" : "pass"} source`),
			frames.map(([file, line, name], k) =>
				button(`f-frame${k === level ? ".on" : ""}`,
					(k ? "called at " : "") + file.split("/").pop() + (line ? `:${line}` : ""),
					`${file} line ${line}, in ${name}`, () => { this.level = k; this.tell(); })));
		const text = quiet ? quiet.sentence : step ? step.t : `start: ${data.title}, ${plural(this.place.size, "node")}.${
			story.last ? " ▶ or Right: the next step." : ""}`;
		if (this.sentence.textContent !== text) this.sentence.textContent = text;
		flag(this.sentence, "bad", !!step && step.k === "error");
		fill(this.change, step && !quiet && this.changed(step));
		const pass = quiet || (isPass && this.step === span.last ? span : null), same = pass && pass.same, facts = [];
		const fact = (label, words, bad, more) =>
			facts.push(h(`div${bad ? ".bad" : ""}`, `${label}: `, h("b", words), more));
		const link = same && story.rows.has(same.row) && button("f-link", "show", `show ${same.name}`, () => {
			this.unfold(same.row);
			this.select(same.row);
			this.focus();
		});
		if (step && !quiet && !["value", "error"].includes(step.k))
			fact("well formed", step.wf ? `no: ${step.wf}` : "yes", step.wf);
		const unknown = pass ? "not checked" : "not checked inside a pass";
		if (isPass || quiet) fact("same output", same ? same.text : unknown, same && same.verdict === "different", link);
		if (pass && pass.kept.length)
			facts.push(h("details", h("summary", `${plural(pass.kept.length, "note")} on what ${pass.name} left alone`),
				h("ul", pass.kept.map((note) => h("li", note)))));
		fill(this.verdicts, facts);
		fill(this.guess, this.guessing && this.quiz());
		const note = (this.host.get("notes") || data.notes)[this.step];
		fill(this.note, note && [h("b", "note "), note]);
		this.about();
		const id = this.row ?? (step ? step.r : null), [made] = id === null ? [] : story.rows.get(id).source;
		fill(this.userhead, made && isPass && `model source · ${made[0]}:${made[1]}`);
		this.listing(this.user, isPass ? made : null, "u");
		this.listing(this.source, frames[level], "p");
		this.lightRows();
	}

	// The rows that each source line edited in this pass, up to this step.
	edited() {
		if (this.did?.step === this.step) return this.did;
		const out = new Map(), { steps } = this.story;
		out.step = this.step;
		for (const { w, r, m } of steps.slice(this.story.span(this.story.pass(this.step)).first, this.step + 1))
			for (const at of w.map(key)) {
				const ids = out.get(at) || out.set(at, new Set()).get(at);
				for (const id of [r, ...m]) if (id !== null) ids.add(id);
			}
		return (this.did = out);
	}

	listing(box, place, kind) {
		box.hidden = !place;
		if (!place) return;
		const source = this.data.sources[place[3]], about = source ? String(place[3]) : `${place[0]}:${place[1]}`,
			did = this.edited();
		if (box.dataset.about !== about) {
			box.dataset.about = about;
			fill(box, source ? source.text.split("\n").map((text, k) =>
				h("div.f-code-line", { "data-line": `${kind}${place[3]}:${source.line + k}` },
					h("span.no", String(source.line + k)), h("span", { style: `--i:${text.search(/\S/) + 4}ch` }, text || " ")))
				: h("div.dim", `${place[0]}:${place[1]} in ${place[2]} (its text was not stored)`));
		}
		const lines = [...box.children], at = lines.findIndex((line) => line.dataset.line === kind + key(place));
		lines.forEach((line, k) => {
			flag(line, "now", k === at);
			flag(line, "did", kind === "p" && did.has(line.dataset.line?.slice(1)));
			attrs(line, { "aria-current": k === at && "true" });
		});
		// Sizes are asked for when nothing else will change: each question costs a layout.
		if (at >= 0) requestAnimationFrame(() => {
			const { offsetTop, offsetHeight } = lines[at], { scrollTop, clientHeight } = box;
			if (offsetTop < scrollTop || offsetTop + offsetHeight > scrollTop + clientHeight)
				box.scrollTop = (lines[at - (clientHeight / offsetHeight >> 1)] || lines[at]).offsetTop;
		});
	}

	changed(step) {
		const out = [], i = this.step;
		const both = (before, after) => out.push(before && h("div.minus", `− ${elide(before, 400)}`),
			after && h("div.plus", `+ ${elide(after, 400)}`));
		if (step.k === "value") return this.value(step.v);
		if (step.k === "error") return [h("div", step.v.text)];
		for (const text of step.b || []) both(text);
		for (const text of step.a || []) both("", text);
		if (out.length || step.k === "result") return out;
		const touched = step.k === "reroute" ? step.m : step.r === null ? [] : [step.r];
		for (const id of touched.slice(0, 5)) {
			const before = step.k === "create" ? "" : this.story.line(id, i - 1),
				after = step.k === "erase" ? "" : this.story.line(id, i);
			if (before !== after) both(before, after);
		}
		if (touched.length > 5) out.push(h("div.dim", `and ${touched.length - 5} more`));
		return out;
	}

	value(v) {
		const bars = v.histogram || [], top = Math.max(1, ...bars), image = v.thumbnail;
		const rects = bars.map((n, k) => svg("path", { d: `M${k * 10} 40v${(-38 * n) / top}h9V40` }));
		return [v.seconds && h("div", short(v.seconds * 1e3, "ms")),
			bars.length > 0 && svg("svg", { class: "f-hist", viewBox: "0 0 160 40", role: "img",
				"aria-label": `histogram: ${bars.join(" ")}` }, rects),
			image && h("img.f-thumb", { src: `data:image/png;base64,${image}`, alt: "its last two dimensions" })];
	}

	about() {
		this.detail.hidden = this.row === null;
		if (this.row === null) return;
		const { path, source } = this.info(this.row), now = this.now(this.row), { from } = now;
		const gone = this.story.steps.findLastIndex((step, k) =>
			k <= this.step && step?.k === "erase" && step.r === this.row);
		const dim = (text) => h("span.dim", text), [, module, type] = this.data.paths[path] || [];
		const link = (id) => [button("f-link", elide(this.nameOf(id), 40), this.nameOf(id), () => this.select(id)), " "];
		const links = (label, ids) => [dim(label), ids.length ? ids.slice(0, 8).map(link) : "nothing ",
			ids.length > 8 ? `and ${ids.length - 8} more ` : ""];
		fill(this.detail,
			h("div.full", h("b", elide(now.name, 200)), ` ${OPS[now.letter]} ${now.shape}`),
			h("div", this.place.has(this.row)
				? [links("◂ reads ", now.ins), links("▸ read by ", this.users.get(this.row) || [])]
				: links(`${gone > 0 ? `erased at step ${gone}` : "not at this step"}; read `, now.ins)));
		const line = this.story.line(this.row, this.step);
		// What was there before has taken up what it came from.
		const own = from[0] > this.row && now.name;
		const joint = (id, k) => (this.info(from[k - 1])?.past.at(-1).from.includes(id) ? " ← " : k || own ? " + " : "");
		if (from.length) add(this.detail, h("div", dim("came from "), own,
			from.map((id, k) => [joint(id, k), this.info(id) ? this.nameOf(id) : id])));
		const made = source.map(([file, line, name]) => `${file}:${line} ${name}`).join(" ← ");
		add(this.detail, h("div.full", h("code", line)), h("div", module && [dim("in "), `${module} ${type} `],
			made && [dim("made at "), made]));
	}

	chrome() {
		const { data, story } = this, step = story.steps[this.step], s = step ? step.s : -1, pass = data.passes[s];
		this.chips.forEach((chip, k) => {
			const { name, first, bad } = data.passes[k], n = size(data.passes[k]), [span] = chip.children;
			const text = (at) => `${elide(name, 28)} ${at}${n}${bad && ` · ${bad}`}`;
			span.textContent = text(k === s ? `${this.step - first + 1}/` : "");
			span.dataset.widest ||= text(`${n}/`);
			for (const one of [chip, this.strips[k]]) flag(one, "on", k === s);
			attrs(chip, { "aria-current": k === s ? "step" : null });
		});
		const live = this.outer().length, before = pass ? pass.nodes : live;
		this.counts.textContent = before === live ? plural(live, "node") : `nodes ${before} → ${live}`;
		const folded = this.items.flatMap(({ group, slots }) => (group ? alive(slots) : [])).length;
		this.state.textContent = `${folded ? `${plural(folded, "row")} folded` : ""} ${this.closed ? "gaps closed" : ""}`;
		flag(this.root, "pales", this.frame.slots.some(({ mark, strong }) => mark && !strong));
		fill(this.heads, h("div.f-line", "code"), h("div.f-shape", data.width > 0 && "shape"),
			[...this.columns].map(({ title, tip }) => h("div.f-metric", { title: tip }, title)));
		const label = step ? `step ${this.step} of ${story.last} · ${elide(step.c, 48)}`
			: `start, ${plural(story.last, "step")}`;
		this.slider.value = this.step;
		this.code.textContent = label;
		attrs(this.slider, { "aria-valuetext": label });
	}

	click({ target }) {
		const row = target.closest("[data-index]"), item = row && this.items[row.dataset.index];
		this.focus();
		if (item && (item.group || item.slots[0].st < 2)) this.choose(+row.dataset.index);
		if (item && item.group && target.closest(".nm")) this.toggle();
	}

	// The rows that a source line edited or made.
	behind(line, edited, made) {
		const at = line.slice(1), ids = this.frame.slots.map(({ id }) => id);
		return [...(line[0] === "p" && edited.get(at) || []),
			...ids.filter((id) => made && this.info(id).source.some((place) => key(place) === at))];
	}

	// Hovering a row or a source line lights up the other two; so does the selected row.
	light(what) {
		if (what === this.lit) return;
		this.lit = what;
		this.lightRows();
	}

	lightRows() {
		const { lit, row } = this, edited = this.edited(), isLine = typeof lit === "string";
		const made = isLine && (lit[0] === "u" || this.story.span(this.story.pass(this.step)).kind !== "pass");
		const ids = new Set(isLine ? this.behind(lit, edited, made) : lit && lit.slots.map(({ id }) => id));
		const lines = new Set(isLine ? [lit] : []);
		for (const id of isLine ? [] : lit ? ids : row === null ? [] : [row]) {
			for (const [line, rows] of edited) if (rows.has(id)) lines.add(`p${line}`);
			for (const place of this.info(id).source) lines.add(`u${key(place)}`).add(`p${key(place)}`);
		}
		for (const one of this.root.querySelectorAll("[data-index], [data-line]")) {
			const { index, line } = one.dataset;
			flag(one, "lit", line ? lines.has(line) : this.items[index].slots.some(({ id }) => ids.has(id)));
		}
	}

	chooseLine(line) {
		const at = line.slice(1);
		if (this.guessing && line[0] === "p") { this.judge(null, at); return; }
		const found = this.behind(line, this.edited(), true).find((id) => this.spot(id) >= 0);
		if (found >= 0) this.select(found);
	}

	matching() {
		const wanted = this.query.toLowerCase(), out = [];
		const hit = ({ id, st }) => {
			const now = this.now(id), places = this.info(id).source.map(([file, line]) => `${file}:${line}`);
			return st < 2 && [now.name, now.target, OPS[now.letter], now.shape, ...places].some((text) =>
				text.toLowerCase().includes(wanted));
		};
		if (wanted) this.items.forEach(({ slots }, index) => { if (slots.some(hit)) out.push(index); });
		const exact = (index) => this.items[index].slots.some(({ id }) => this.nameOf(id).toLowerCase() === wanted);
		out.sort((a, b) => exact(b) - exact(a));
		this.total = wanted ? this.frame.slots.filter(hit).length : 0;
		return out;
	}

	find(query, by, nth = by && this.nth + by) {
		this.query = query.trim();
		const [, name, step, row] = this.query.match(/^(.*):(\d+)(?:\/(.*))?$/s) || [];
		if (by && this.data.passes.some((pass) => pass.name === name)) {
			this.go(+step);
			if (row) this.pick(row);
			return;
		}
		const hits = (this.hits = this.matching()), n = hits.length, at = hits[(this.nth = (nth + n) % (n || 1))];
		if (at >= 0 && by && this.items[at].group) {
			this.folds.set(this.items[at].group.key, true);
			this.group = null;
			this.show();
			this.find(query, by, this.nth);
			return;
		}
		if (at >= 0) this.choose(at); else this.repaint();
		const which = at >= 0 ? `${this.nth + 1} of ` : "";
		this.say(this.query ? `${which}${this.total} found` : "");
	}

	predict(on) {
		if (this.guessing === on) return;
		Object.assign(this, { guessing: on, judged: null });
		flag(this.predictButton, "on", on);
		attrs(this.predictButton, { "aria-pressed": String(on) });
		flag(this.root, "predicting", on);
		this.host.set("predict", on);
		if (this.frame) this.show();
	}

	quiz() {
		if (this.step >= this.story.last) return [h("div", "This was the last step.")];
		const next = tool("show me", "show the next step", () => { this.go(this.step + 1); this.focus(); });
		if (this.judged) return [h(`div.${this.judged.right ? "right" : "wrong"}`, { role: "status" }, this.judged.text),
			next];
		const kinds = ["create", "reroute", "erase", "args", "move", "rename", "target", "module"].map((kind) =>
			tool(kind, `guess: ${kind} at the selected row`, () => this.judge(kind)));
		return [h("div", "What comes next? Select a row, then an edit; or pick a line of the pass."),
			h("div.f-kinds", kinds, next)];
	}

	// Any edit of the same match is a right guess.
	judge(kind, line) {
		const from = this.step + 1, next = this.story.steps.slice(from, from + (this.story.steps[from]?.n || 0));
		const right = next.find(({ w, k, r, m, e = [] }) =>
			(line ? w.some((place) => key(place) === line) : k === kind && [r, ...m, e[2]].includes(this.row)));
		if (next.length) this.judged = { right, text: right ? `Yes: ${right.t}` : `Not next. What comes: ${next[0].t}` };
		this.tell();
		this.focus();
	}

	// Wall mode is in the browser's top layer: nothing clips it.
	wall(on) {
		if (this.isWall === on) return;
		const { root } = this;
		flag(root, "wall", (this.isWall = on));
		attrs(root, { popover: on && "manual" });
		if (on && root.isConnected) root.showPopover();
		this.host.set("wall", on);
		this.wide = 0;
		if (this.frame) { this.show(true); this.focus(); }
	}

	help() {
		this.helpBox.hidden = !this.helpBox.hidden;
		if (this.helpBox.hidden) this.focus(); else this.helpBox.querySelector("button").focus();
	}

	// The kernel draws the classic picture; a page has some with it.
	picture(reply) {
		if (reply?.kind) {
			clearTimeout(this.waiting);
			fill(this.pane, reply.text, reply.svg && h("img",
				{ src: `data:image/svg+xml;base64,${reply.svg}`, alt: `graph of step ${reply.step}` }));
			return;
		}
		const on = reply === "again" || this.pane.hidden;
		this.pane.hidden = !on;
		this.grid.hidden = this.heads.hidden = on;
		this.tabButton.textContent = on ? "code" : "picture";
		if (!on) { this.resize(); return; }
		const say = (text) => fill(this.pane, text);
		say("drawing …");
		clearTimeout(this.waiting);
		const gone = () => say("No answer: the kernel that showed this has gone. All else here works.");
		this.waiting = setTimeout(gone, 8e3);
		try { this.host.ask({ kind: "picture", step: this.step }); } catch { gone(); }
	}

	leave() {
		if (!this.helpBox.hidden) this.help();
		else if (document.activeElement === this.search) this.focus();
		else if (this.isWall) this.wall(false);
		else {
			const cell = this.root.closest(".jp-Cell, .jp-Notebook");
			document.activeElement.blur();
			cell?.focus({ preventScroll: true });
		}
	}

	press(event) {
		const { key: name, shiftKey, target } = event, by = shiftKey ? -1 : 1;
		const go = (to) => (shiftKey ? this.goPass(to) : this.go(this.step + to));
		if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey || name === "Tab") return;
		const act = {
			Escape: () => this.leave(), ArrowLeft: () => go(-1), ArrowRight: () => go(1), PageUp: () => this.goPass(-1),
			PageDown: () => this.goPass(1), Home: () => this.go(0), End: () => this.go(this.story.last),
			ArrowUp: () => this.along(-1), ArrowDown: () => this.along(1), Enter: () => this.toggle(), n: () =>
				this.nextChange(by),
			i: () => this.row !== null && this.toward("i", this.now(this.row).ins, shiftKey),
			u: () => this.toward("u", this.users.get(this.row), shiftKey),
			c: () => { this.closed = !this.closed; this.show(true); }, p: () => this.predict(!this.guessing),
			w: () => this.wall(!this.isWall), "?": () => this.help(), "/": () =>
				{ this.search.focus(); this.search.select(); },
		};
		let run = act[name] || act[name.toLowerCase()];
		if (target === this.split && name.startsWith("Arrow"))
			run = () => this.divide(target.getBoundingClientRect().x + (name === "ArrowLeft" ? -40 : 40));
		if (target === this.search && name !== "Escape") {
			event.stopPropagation();
			if (name !== "Enter") return;
			run = () => this.find(this.search.value, by);
		} else if (target !== this.grid && target !== this.slider && ["Enter", " "].includes(name)) {
			event.stopPropagation();
			return;
		}
		if (!run) return;
		event.preventDefault();
		event.stopPropagation();
		run();
	}
}

async function unpack(bytes) {
	const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
	return JSON.parse(await new Response(stream).text());
}

async function render({ model, el }) {
	const bytes = model.get("_story"), root = h("div.fxl"), offs = [];
	let own = false;
	el.append(root);
	const viewer = new Viewer(root, await unpack(bytes), {
		get: (name) => model.get(name),
		set: (name, value) => {
			if (model.get(name) === value) return;
			own = true;
			model.set(name, value);
			own = false;
			model.save_changes();
		},
		on: (name, run) => {
			const event = name === "picture" ? "msg:custom" : `change:${name}`;
			const call = (message) => { if (name === "picture" ? message.kind === name : !own) run(message); };
			model.on(event, call);
			offs.push(() => model.off(event, call));
		},
		ask: (message) => model.send(message),
	});
	return () => { viewer.close(); offs.forEach((off) => off()); };
}

// A page calls this with its story in base64; the address keeps the step (#12).
export async function open(root, packed, values) {
	const data = await unpack(Uint8Array.from(atob(packed), (c) => c.charCodeAt(0))),
		kept = { notes: data.notes, ...values }, { pictures = [] } = data;
	let reply, late;
	kept.step = location.hash.slice(1) || kept.step;
	return new Viewer(root, data, {
		get: (name) => kept[name],
		on: (name, run) => { if (name === "picture") reply = run; },
		set: (name, value) => {
			kept[name] = value;
			if (name !== "step") return;
			clearTimeout(late);
			late = setTimeout(() => history.replaceState(null, "", `#${value}`), 200);
		},
		ask: pictures.length ? ({ step }) => {
			const [at, drawn] = pictures.findLast(([first]) => first <= step) || pictures[0];
			reply({ kind: "picture", step: at, svg: drawn, text: `as of step ${at}` });
		} : null,
	});
}

export default { render };
