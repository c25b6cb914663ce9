// The explorer's front end: one program's history, drawn beside its code. No dependency, no request, and every text of
// a model is set as text. Data comes from view.py (its docstring has the format); lanes.py has the layout in Python.

const OPS = { P: "placeholder", G: "get_attr", F: "call_function", ".": "call_method", M: "call_module", O: "output" };
const LANE = 18, LANES = 14, FLAT = 300, OPENED = 100;
const KEYS = [
  ["Left, Right", "one step back, on"], ["Shift+Left, Right or PageUp, PageDown", "pass back, on"],
  ["Home, End", "first, last step"], ["N, Shift+N", "next, previous change (of the selected row, if any)"],
  ["Up, Down", "along the rows"], ["I, U", "to an input, to a user (reader)"], ["Enter", "fold, unfold"],
  ["C", "close the gaps"], ["/", "search: name, target, opcode, shape, file:line, or a step's code"],
  ["P", "predict the next edit"], ["W", "wall: fill the window"], ["?", "this help"], ["Escape, Tab", "leave"],
];

function add(element, ...kids) {
  for (const kid of kids.flat(4)) if (kid !== null && kid !== undefined && kid !== "") element.append(kid);
  return element;
}
const h = (tag, name, ...kids) => {
  const element = document.createElement(tag);
  if (name) element.className = name;
  return add(element, kids);
};
const attrs = (element, values) => {
  for (const [key, value] of Object.entries(values)) {
    if (value === null || value === undefined || value === false) element.removeAttribute(key);
    else if (element.getAttribute(key) !== String(value)) element.setAttribute(key, value);
  }
  return element;
};
const svg = (tag, values, ...kids) =>
  add(attrs(document.createElementNS("http://www.w3.org/2000/svg", tag), values), kids);
const plural = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;
const button = (name, text, label, run) => {
  const element = attrs(h("button", name, text), {
    type: "button", "aria-label": label, title: label, "data-lm-suppress-shortcuts": "true",
  });
  element.addEventListener("click", run);
  return element;
};
const short = (n) => {
  for (const [unit, size] of [["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3]])
    if (Math.abs(n) >= size) return `${+(n / size).toPrecision(3)} ${unit}`;
  return String(+Number(n).toPrecision(3));
};
const elide = (text, room) => {
  if (text.length <= room) return text;
  const tail = Math.max(0, Math.floor((room - 1) * 0.4));
  return text.slice(0, Math.max(1, room - 1 - tail)) + "\u2026" + (tail ? text.slice(-tail) : "");
};

// Pack the values of a frame into lanes: the same sweep as lanes.py. A null input list holds a place only.
export function layout(inputs, leaf, limit = LANES) {
  const count = inputs.length, end = inputs.map((_, row) => row), back = [];
  inputs.forEach((read, row) => {
    for (const producer of read || []) if (producer < row) end[producer] = row; else back.push([row, producer]);
  });
  const pack = (chosen, first) => {
    const lane = new Array(count).fill(-1), free = [];
    let width = first, unread = -1;
    const release = (value) => {
      let at = free.length;
      while (at > 0 && free[at - 1] < value) at--;
      free.splice(at, 0, value);
    };
    for (let row = 0; row < count; row++) {
      if (unread >= 0) { release(unread); unread = -1; }
      if (!inputs[row]) continue;
      const ending = [];
      for (const p of inputs[row])
        if (p < row && end[p] === row && lane[p] >= 0 && !ending.includes(lane[p])) ending.push(lane[p]);
      if (!chosen || chosen[row]) {
        let mine;
        if (ending.length) { mine = Math.min(...ending); ending.splice(ending.indexOf(mine), 1); }
        else mine = free.length ? free.pop() : width++;
        lane[row] = mine;
        if (end[row] === row) unread = mine;
      }
      ending.forEach(release);
    }
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
    this.steps = [null, ...data.steps.map((step) => ({ ...step, w: step.w.map(place) }))];
    this.last = data.steps.length;
    this.rows = new Map();
    this.order = data.programs.map(() => []);
    this.results = new Map();
    this.trees = new Map();
    for (const [id, letter, name, line, target, ins, shape, path, source, from] of data.rows)
      this.rows.set(id, { id, path, source: source.map(place), from: from || [],
        past: [{ since: 0, letter, name, line, target, ins, shape }] });
    data.steps.forEach((step, index) => {
      for (const [id, change] of step.ch || []) {
        const past = this.rows.get(id).past;
        past.push({ ...past[past.length - 1], ...change, since: index + 1 });
      }
    });
  }

  // A line comes as pieces: text, and the numbers of rows where their names stand.
  text(parts, step) {
    return parts.map((part) => (typeof part === "number" ? this.at(part, step).name : part)).join("");
  }

  at(id, step) {
    const past = this.rows.get(id).past;
    let k = past.length - 1;
    while (k > 0 && past[k].since > step) k--;
    return past[k];
  }

  pass(step) { return step ? this.steps[step].s : this.last ? this.steps[1].s : 0; }

  span(s) { return this.data.passes[s] || { name: "start", first: 1, last: 0 }; }

  // The slots of one pass: every row that lives in it at any time, in an order that no step of the pass changes.
  slots(s, p) {
    const done = this.order[p];
    while (done.length <= s) {
      const before = done.length ? done[done.length - 1].filter((slot) => slot.died === Infinity).map((x) => x.id)
        : this.data.programs[p].rows;
      const head = { next: null }, where = new Map(), { first, last } = this.span(done.length);
      let tail = head;
      const insert = (id, after, born) => {
        const slot = { id, born, died: Infinity, next: after.next };
        after.next = slot;
        where.set(id, slot);
        return slot;
      };
      for (const id of before) tail = insert(id, tail, -1);
      for (let i = first; i <= last; i++) {
        const step = this.steps[i], [kind, id, previous] = step.e || [];
        if (step.p !== p || !kind) continue;
        if (kind !== "c" && where.has(id)) where.get(id).died = i;
        if (kind !== "x") insert(id, where.get(previous) || head, i);
      }
      const list = [];
      for (let slot = head.next; slot; slot = slot.next) list.push(slot);
      done.push(list);
    }
    return done[s];
  }

  // A pass that returns another program: both programs' rows, paired ones once.
  result(i) {
    if (this.results.has(i)) return this.results.get(i);
    const step = this.steps[i], list = [], parts = new Map(step.parts);
    const live = (p) => this.slots(step.s, p).filter((x) => x.born <= i && x.died > i).map((x) => x.id);
    const pair = new Map(step.pairs), gone = new Set(live(step.was));
    for (const id of live(step.p)) gone.delete(pair.get(id));
    const left = live(step.was), at = new Map(left.map((id, k) => [id, k]));
    let k = 0;
    for (const id of live(step.p)) {
      const until = pair.has(id) ? at.get(pair.get(id)) : -1;
      for (; k < until; k++) if (gone.has(left[k])) list.push({ id: left[k], born: -1, died: i });
      list.push({ id, born: pair.has(id) ? -1 : i, died: Infinity });
      if (parts.has(id))
        for (const inner of live(parts.get(id))) {
          list.push({ id: inner, born: -1, died: Infinity, inner: true });
          gone.delete(pair.get(inner));
        }
    }
    for (; k < left.length; k++) if (gone.has(left[k])) list.push({ id: left[k], born: -1, died: i });
    this.results.set(i, list);
    return list;
  }

  // Rows of step i: st 0 live, 1 ghost, 2 not created yet; mark + - ~, strong when it is this step's.
  frame(i) {
    const step = this.steps[i], s = this.pass(i), p = step ? step.p : 0, touched = new Map();
    const isResult = step && step.k === "result", list = isResult ? this.result(i) : this.slots(s, p);
    for (let j = this.span(s).first; j <= i; j++) for (const id of this.steps[j].m || []) touched.set(id, j);
    const slots = list.map((slot) => {
      const st = i < slot.born ? 2 : i >= slot.died ? 1 : 0;
      let mark = "", strong = false;
      if (st === 1) { mark = "-"; strong = slot.died === i; }
      else if (st === 0 && slot.born > 0 && (slot.born === i || touched.get(slot.id) !== i)) {
        mark = "+";
        strong = slot.born === i;
      } else if (st === 0 && touched.has(slot.id)) { mark = "~"; strong = touched.get(slot.id) === i; }
      return { id: slot.id, st, mark, strong, inner: slot.inner };
    });
    return { i, s, p, slots, key: isResult ? `r${i}` : `${s}/${p}` };
  }

  // Modules as groups of neighbouring rows; neighbours of one shape become one repeat.
  tree(frame) {
    if (this.trees.has(frame.key)) return this.trees.get(frame.key);
    const root = { kids: [], key: "", up: null, sign: "" }, open = [root], seen = new Map(), of = new Map();
    const chain = (path) => { const out = []; for (; path >= 0; path = this.data.paths[path][0]) out.unshift(path); return out; };
    frame.slots.forEach((slot, index) => {
      const path = this.rows.get(slot.id).path, steps = of.get(path) || of.set(path, chain(path)).get(path);
      let d = 0;
      while (d < steps.length && d + 1 < open.length && open[d + 1].path === steps[d]) d++;
      open.length = d + 1;
      for (; d < steps.length; d++) {
        const n = (seen.get(steps[d]) || 0) + 1;
        seen.set(steps[d], n);
        const group = { path: steps[d], kids: [], key: `${steps[d]}#${n}`, up: open[d], size: 0 };
        open[d].kids.push(group);
        open.push(group);
      }
      open[d].kids.push(index);
    });
    const groups = [], home = new Map(), stack = [root];
    while (stack.length) {
      const group = stack.pop();
      groups.push(group);
      for (const kid of group.kids) if (typeof kid === "object") stack.push(kid);
    }
    for (const group of groups.reverse()) {
      const kids = [];
      group.size = 0;
      let sign = group.path >= 0 ? String(this.data.paths[group.path][2]) : "";
      for (const kid of group.kids) {
        const inner = typeof kid === "object";
        group.size += inner ? kid.size : 1;
        const one = inner ? kid.sign : this.sign(frame.slots[kid].id);
        sign = hash(`${sign}|${one}`);
        if (!inner || kid.size > 1) { kids.push(kid); continue; }
        for (const only of kid.kids) kids.push(only);
      }
      if (kids.length === 1 && typeof kids[0] === "object" && group.up) {
        group.kids = kids[0].kids;
        group.path = kids[0].path;
      } else group.kids = kids;
      group.sign = sign;
    }
    for (const group of groups) {
      const kids = [];
      for (let k = 0; k < group.kids.length;) {
        const first = group.kids[k];
        let to = k + 1;
        if (typeof first === "object")
          while (to < group.kids.length && group.kids[to].sign === first.sign) to++;
        if (to - k < 2) kids.push(first);
        else {
          const run = group.kids.slice(k, to), size = run.reduce((sum, kid) => sum + kid.size, 0);
          kids.push({ path: first.path, kids: run, key: `x${first.key}`, up: group, size, times: to - k });
        }
        k = to;
      }
      group.kids = kids;
    }
    const opened = new Set([""]);
    const walk = [root];
    let shown = root.kids.length;
    for (let k = 0; k < walk.length; k++)
      for (const kid of walk[k].kids) {
        if (typeof kid === "number") { home.set(kid, walk[k]); continue; }
        kid.up = walk[k];
        walk.push(kid);
        if (frame.slots.length <= FLAT || (opened.has(walk[k].key) && shown + kid.kids.length <= OPENED)) {
          opened.add(kid.key);
          shown += kid.kids.length - 1;
        }
      }
    const tree = { root, home, opened, groups: walk.slice(1) };
    this.trees.set(frame.key, tree);
    return tree;
  }

  sign(id) {
    const { letter, target } = this.rows.get(id).past[0];
    return letter + (letter === "M" || letter === "G" ? target.slice(target.lastIndexOf(".") + 1) : target);
  }

  // Steps i+1... that belong to one match: until the pass comes back to a line that it has already been at.
  match(i) {
    const out = [], lines = new Set(), s = i < this.last ? this.steps[i + 1].s : -1;
    for (let j = i + 1; j <= this.last && this.steps[j].s === s; j++) {
      const frame = (this.steps[j].w || [])[0], line = frame ? `${frame[0]}:${frame[1]}` : "";
      if (lines.has(line) && out[out.length - 1].line !== line) break;
      lines.add(line);
      out.push({ line, step: this.steps[j] });
    }
    return out.map((entry) => entry.step);
  }
}
function hash(text) {
  let value = 2166136261;
  for (let k = 0; k < text.length; k++) value = Math.imul(value ^ text.charCodeAt(k), 16777619);
  return String(value >>> 0);
}

export class Viewer {
  constructor(root, data, host) {
    Object.assign(this, { root, data, host, story: new Story(data), step: 0, row: null, hover: null, folds: new Map(),
      gaps: true, kept: new Map(), hits: [], columns: new Set(), query: "", tab: "code", scrolled: true });
    this.build();
    this.theme();
    const start = Number(host.get("step"));
    this.wall(!!host.get("wall"));
    this.predict(!!host.get("predict"));
    this.go(Number.isInteger(start) ? start : 0);
    this.pick(host.get("selection") || "");
    host.on("step", () => this.go(Number(host.get("step")) || 0));
    host.on("selection", () => this.pick(host.get("selection") || ""));
    host.on("wall", () => this.wall(!!host.get("wall")));
    host.on("predict", () => this.predict(!!host.get("predict")));
    host.on("notes", () => this.show());
    host.on("picture", (reply) => this.picture(reply));
    this.sizes = new ResizeObserver(() => this.resize());
    this.sizes.observe(this.grid);
    this.root.dataset.ready = "true";
  }

  build() {
    const d = this.data, go = (step) => () => this.go(step());
    this.chips = d.passes.map((pass, s) => {
      const chip = button("fxl-chip", h("span", ""), `pass ${pass.name}`, () => this.openPass(s));
      if (pass.quiet) chip.classList.add("quiet");
      return chip;
    });
    this.counts = h("span", "fxl-counts");
    this.search = attrs(h("input", "fxl-search"), { type: "search", placeholder: "/ search", spellcheck: "false",
      "aria-label": "search name, target, opcode, shape, file:line, or a step's code",
      "data-lm-suppress-shortcuts": "true" });
    this.search.addEventListener("input", () => this.find(this.search.value, 0));
    this.found = attrs(h("span", "fxl-found"), { role: "status" });
    this.predictButton = button("fxl-b", "predict", "predict the next edit (P)", () => this.predict(!this.guessing));
    this.columnMenu = h("details", "fxl-menu", attrs(h("summary", "fxl-b", "columns"),
      { "data-lm-suppress-shortcuts": "true" }));
    const choices = h("div", "fxl-choices");
    for (const metric of d.metrics) {
      const box = attrs(h("input"), { type: "checkbox", "data-lm-suppress-shortcuts": "true" });
      box.checked = !!metric.on;
      if (metric.on) this.columns.add(metric.id);
      box.addEventListener("change", () => {
        this.columns[box.checked ? "add" : "delete"](metric.id);
        this.show();
      });
      choices.append(h("label", "", box, ` ${metric.title}`));
    }
    this.columnMenu.append(choices);
    this.columnMenu.hidden = !d.metrics.length;
    const tool = h("div", "fxl-tools", this.search, this.found,
      this.tabButton = button("fxl-b", "picture", "the classic box-and-arrow picture", () => this.picture()),
      this.columnMenu,
      button("fxl-b", "fold", "fold all modules", () => this.foldAll(false)),
      button("fxl-b", "unfold", "unfold all modules", () => this.foldAll(true)), this.predictButton,
      button("fxl-b", "wall", "wall mode (W)", () => this.wall(!this.isWall)),
      button("fxl-b", "?", "help (?)", () => this.help()));
    if (!this.host.ask) this.tabButton.hidden = true;
    this.top = h("div", "fxl-top", h("strong", "fxl-title", d.title), h("div", "fxl-chips", this.chips), this.counts, tool);
    this.strip = h("div", "fxl-strip");
    this.sourceHead = h("div", "fxl-head");
    this.source = h("div", "fxl-source");
    this.userHead = h("div", "fxl-head");
    this.user = h("div", "fxl-source fxl-user");
    this.live = attrs(h("div", "fxl-sentence"), { "aria-live": "polite" });
    this.change = h("div", "fxl-change");
    this.verdicts = h("div", "fxl-verdicts");
    this.guess = h("div", "fxl-guess");
    this.note = h("div", "fxl-note");
    this.detail = h("div", "fxl-detail");
    this.say = h("div", "fxl-say", this.live, this.change, this.verdicts, this.guess, this.note);
    this.left = h("div", "fxl-left", this.sourceHead, this.source, this.say, this.detail, this.userHead, this.user);
    this.canvas = h("div", "fxl-canvas");
    this.lanes = svg("svg", { class: "fxl-lanes", "aria-hidden": "true" });
    this.canvas.append(this.lanes);
    this.grid = attrs(h("div", "fxl-grid", this.canvas), { tabindex: 0, role: "treegrid", "aria-readonly": "true",
      "aria-label": `${d.title}: nodes beside their code`, "data-lm-suppress-shortcuts": "true" });
    this.pane = h("div", "fxl-picture");
    this.pane.hidden = true;
    this.legend = h("div", "fxl-legend");
    this.slider = attrs(h("input", "fxl-slider"), { type: "range", min: 0, max: this.story.last, step: 1,
      "aria-label": "step", "data-lm-suppress-shortcuts": "true" });
    this.slider.addEventListener("input", () => this.go(Number(this.slider.value)));
    this.ticks = h("div", "fxl-ticks");
    for (const pass of d.passes)
      if (pass.first > 1 && pass.last >= pass.first) {
        const tick = h("i");
        tick.style.left = `${(100 * (pass.first - 1)) / this.story.last}%`;
        this.ticks.append(tick);
      }
    this.code = attrs(h("button", "fxl-code"), { type: "button", "data-lm-suppress-shortcuts": "true" });
    this.code.addEventListener("click", () => {
      const step = this.story.steps[this.step];
      if (step && navigator.clipboard) navigator.clipboard.writeText(step.c).catch(() => {});
    });
    this.foot = h("div", "fxl-foot",
      button("fxl-nav", "\u25c0", "one step back (Left)", go(() => this.step - 1)),
      h("div", "fxl-track", this.ticks, this.slider),
      button("fxl-nav", "\u25b6", "one step on (Right)", go(() => this.step + 1)), this.code);
    this.helpBox = attrs(h("div", "fxl-help"), { role: "dialog", "aria-label": "keys" });
    this.helpBox.hidden = true;
    this.helpBox.append(h("strong", "", "Keys"), h("dl", "", KEYS.map(([key, what]) => [h("dt", "", key), h("dd", "", what)])),
      button("fxl-b", "close", "close the help", () => this.help()));
    add(this.root, this.top, this.strip, h("div", "fxl-main", this.left, h("div", "fxl-right", this.grid, this.pane)),
      this.legend, this.foot, this.helpBox);
    this.root.addEventListener("keydown", (event) => this.key(event));
    this.grid.addEventListener("scroll", () => this.paint(), { passive: true });
    this.grid.addEventListener("click", (event) => this.click(event));
    this.grid.addEventListener("dblclick", () => this.toggle());
    const over = (event) => {
      const line = event.target.closest("[data-line]"), row = event.target.closest("[data-index]");
      this.light(line ? { line: line.dataset.line } : row ? { row: this.items[row.dataset.index] } : null);
    };
    this.root.addEventListener("mouseover", over);
    this.root.addEventListener("mouseleave", () => this.light(null));
    for (const box of [this.source, this.user])
      box.addEventListener("click", (event) => {
        const line = event.target.closest("[data-line]");
        if (line) this.chooseLine(line.dataset.line);
      });
  }

  // Light and dark follow the host: JupyterLab and Notebook 7, VS Code, Colab, else the system.
  theme() {
    const media = matchMedia("(prefers-color-scheme: dark)");
    const read = () => {
      const body = document.body, lab = body.dataset.jpThemeLight, kind = body.dataset.vscodeThemeKind || "";
      const colab = document.documentElement.getAttribute("theme");
      const dark = lab ? lab === "false" : kind ? kind.includes("dark") || kind === "vscode-high-contrast"
        : colab ? colab === "dark" : media.matches;
      this.root.dataset.theme = dark ? "dark" : "light";
    };
    read();
    this.watch = new MutationObserver(read);
    for (const element of [document.body, document.documentElement])
      this.watch.observe(element, { attributes: true, attributeFilter: ["data-jp-theme-light", "data-vscode-theme-kind", "theme"] });
    media.addEventListener("change", read);
    this.unwatch = () => media.removeEventListener("change", read);
  }

  close() {
    this.watch.disconnect();
    this.unwatch();
    this.sizes.disconnect();
  }

  go(step) {
    step = Math.max(0, Math.min(this.story.last, step));
    if (step === this.step && this.frame) return;
    this.step = step;
    this.judged = null;
    this.scrolled = false;
    this.host.set("step", step);
    this.show();
  }

  goPass(by) {
    const { passes } = this.data, now = this.step ? this.story.pass(this.step) : -1;
    if (by < 0 && now >= 0 && this.step > passes[now].first) return this.go(passes[now].first - 1);
    if (by > 0 && now >= 0 && this.step < passes[now].last) return this.go(passes[now].last);
    for (let s = now + by; s >= 0 && s < passes.length; s += by)
      if (passes[s].last >= passes[s].first) return this.go(by > 0 ? passes[s].last : passes[s].first - 1);
    return this.go(by > 0 ? this.story.last : 0);
  }

  openPass(s) {
    const pass = this.data.passes[s];
    if (pass.last >= pass.first) this.go(this.step === pass.last ? pass.first : pass.last);
    this.opened = s;
    this.say.classList.toggle("report", true);
    this.tell();
    this.grid.focus({ preventScroll: true });
  }

  // The next step that changes the selected row, or anything at all.
  nextChange(by) {
    for (let i = this.step + by; i >= 1 && i <= this.story.last; i += by) {
      const { m, r, k, s } = this.story.steps[i];
      if (k === "value" || this.data.passes[s].quiet) continue;
      if (this.row === null || r === this.row || (m || []).includes(this.row)) return this.go(i);
    }
    return undefined;
  }

  pick(name) {
    if (this.row !== null && this.nameOf(this.row) === name) return;
    let row = null;
    if (name && this.frame) {
      const named = this.frame.slots.filter((slot) => this.nameOf(slot.id) === name);
      const slot = named.find((one) => one.st === 0) || named[0];
      if (slot) row = slot.id;
    }
    this.select(row, false);
  }

  nameOf(id) { return this.story.at(id, this.step).name; }

  select(row, tellHost = true) {
    this.row = row;
    if (tellHost) this.host.set("selection", row === null ? "" : this.nameOf(row));
    this.group = null;
    this.reveal(row);
    this.paint();
    this.tell();
  }

  // Everything that depends on the step or on the folds.
  show() {
    const frame = (this.frame = this.story.frame(this.step)), tree = (this.tree = this.story.tree(frame));
    const closed = !this.gaps || this.guessing, items = (this.items = []), stack = [[tree.root, 0]];
    while (stack.length) {
      const top = stack[stack.length - 1], kid = top[0].kids[top[1]++];
      if (kid === undefined) stack.pop();
      else if (typeof kid === "number") {
        const slot = frame.slots[kid];
        if (!closed || slot.st === 0 || (slot.st === 1 && slot.strong)) items.push({ slot, level: stack.length });
      } else if (this.isOpen(kid)) stack.push([kid, 0]);
      else {
        const item = { group: kid, level: stack.length, slots: this.inside(kid).map((k) => frame.slots[k]) };
        if (item.slots.some((slot) => slot.st === 0 || !closed)) items.push(item);
      }
    }
    const at = (this.place = new Map()), ghosts = new Map();
    items.forEach((item, index) => {
      for (const slot of item.group ? item.slots : [item.slot])
        if (slot.st === 0) at.set(slot.id, index);
        else if (slot.st === 1) ghosts.set(slot.id, index);
    });
    this.ghosts = ghosts;
    this.users = new Map();
    const reads = (slot) => {
      const now = this.story.at(slot.id, this.step);
      for (const id of new Set(now.ins)) {
        const list = this.users.get(id);
        if (list) list.push(slot.id); else this.users.set(id, [slot.id]);
      }
      return now.ins;
    };
    this.dangling = [];
    const inputs = items.map((item, index) => {
      const live = (item.group ? item.slots : [item.slot]).filter((slot) => slot.st === 0), into = new Set();
      for (const slot of live)
        for (const id of reads(slot)) {
          const from = at.get(id);
          if (from === undefined) this.dangling.push([index, ghosts.get(id)]);
          else if (from !== index || !item.group) into.add(from);
        }
      return live.length ? [...into] : null;
    });
    const leaf = items.map((item) => !item.group && "PG".includes(this.story.at(item.slot.id, this.step).letter));
    this.lane = layout(inputs, leaf, this.laneRoom());
    this.inputs = inputs;
    // The gutter only grows while a pass is stepped, so that the code beside it does not shift back and forth.
    const wide = Math.min(this.laneRoom(), this.lane.width) + (frame.slots.some((slot) => slot.st === 1) ? 1 : 0);
    const key = `${frame.key}|${[...this.folds].join()}`;
    this.gutter = this.gutterKey === key ? Math.max(this.gutter, wide) : Math.max(wide, 2);
    this.gutterKey = key;
    this.liveBytes = null;
    this.hits = this.query ? this.matching(this.query) : [];
    this.measure();
    if (!this.scrolled) this.follow();
    this.paint();
    this.tell();
    this.chrome();
  }

  laneRoom() { return this.root.clientWidth && this.root.clientWidth < 500 ? 5 : LANES; }

  isOpen(group) {
    const own = this.folds.get(group.key);
    return own === undefined ? this.tree.opened.has(group.key) : own;
  }

  inside(group) {
    if (!group.all) {
      group.all = [];
      const stack = [group];
      while (stack.length) {
        const one = stack.pop();
        for (const kid of one.kids) if (typeof kid === "number") group.all.push(kid); else stack.push(kid);
      }
      group.all.sort((a, b) => a - b);
    }
    return group.all;
  }

  foldAll(open) {
    for (const group of this.tree.groups) this.folds.set(group.key, open);
    this.scrolled = false;
    this.show();
  }

  // Enter: open the selected fold, or fold the module that the selected row stands in.
  toggle() {
    if (this.group) {
      this.folds.set(this.group.key, true);
      const first = this.frame.slots[this.inside(this.group)[0]];
      this.group = null;
      this.row = first.id;
      this.show();
      return this.reveal(this.row);
    }
    const index = this.frame.slots.findIndex((slot) => slot.id === this.row);
    let group = index < 0 ? null : this.tree.home.get(index);
    while (group && group.times && group.up) group = group.up;
    if (!group || !group.key) return undefined;
    this.folds.set(group.key, false);
    this.show();
    const at = this.items.findIndex((item) => item.group === group || (item.group && item.group.kids.includes(group)));
    if (at >= 0) this.choose(at);
    return undefined;
  }

  choose(index) {
    const item = this.items[index];
    if (!item) return;
    if (item.group) {
      this.row = null;
      this.group = item.group;
      this.host.set("selection", "");
      this.revealAt(index);
      this.paint();
      this.tell();
    } else this.select(item.slot.id);
  }

  chosen() {
    return this.items.findIndex((item) => (this.group ? item.group === this.group
      : !item.group && item.slot.id === this.row && (item.slot.st !== 1 || !this.place.has(this.row))));
  }

  along(by) {
    let at = this.chosen();
    if (at < 0) at = by > 0 ? Math.floor(this.grid.scrollTop / this.rowHeight) - 1 : this.items.length;
    for (at += by; at >= 0 && at < this.items.length; at += by)
      if (this.items[at].group || this.items[at].slot.st !== 2) return this.choose(at);
    return undefined;
  }

  toward(kind) {
    if (this.row === null) return;
    const list = kind === "in" ? this.story.at(this.row, this.step).ins : this.users.get(this.row) || [];
    const next = list.find((id) => this.place.has(id));
    if (next === undefined) return;
    const item = this.items[this.place.get(next)];
    if (item.group) this.choose(this.place.get(next)); else this.select(next);
  }

  measure() {
    const style = getComputedStyle(this.root);
    this.rowHeight = parseFloat(style.getPropertyValue("--row")) || 24;
    if (!this.charWidth || this.isWall !== this.measuredWall) {
      const probe = h("span", "fxl-line fxl-probe", "0".repeat(50));
      this.canvas.append(probe);
      this.charWidth = probe.getBoundingClientRect().width / 50 || 7.2;
      this.measuredWall = this.isWall;
      probe.remove();
    }
    this.canvas.style.height = `${this.items.length * this.rowHeight}px`;
    this.root.style.setProperty("--gutter", `${(this.gutter + 1) * LANE}px`);
    this.root.style.setProperty("--metrics", String(this.columns.size));
    this.root.classList.toggle("has-metrics", this.columns.size > 0);
  }

  resize() {
    this.kept.forEach((element) => element.remove());
    this.kept.clear();
    this.charWidth = 0;
    if (this.frame) this.show();
  }

  target() {
    const step = this.story.steps[this.step];
    if (!step) return -1;
    for (const id of [step.r, ...(step.m || [])]) {
      const at = this.place.get(id) ?? this.ghosts.get(id);
      if (at !== undefined) return at;
    }
    return -1;
  }

  follow() {
    this.scrolled = true;
    const at = this.target();
    if (at >= 0) this.revealAt(at);
  }

  reveal(row) {
    const at = row === null ? undefined : this.place.get(row) ?? this.ghosts.get(row);
    if (at !== undefined) this.revealAt(at);
  }

  revealAt(at) {
    const y = at * this.rowHeight, height = this.grid.clientHeight, top = this.grid.scrollTop;
    if (!height) return;
    if (y < top + this.rowHeight || y > top + height - 2 * this.rowHeight)
      this.grid.scrollTop = Math.max(0, y - height / 2);
  }

  // The rows in view, and the lanes behind them.
  paint() {
    if (!this.items || !this.rowHeight) return;
    const H = this.rowHeight, height = this.grid.clientHeight || 400, top = this.grid.scrollTop;
    const from = Math.max(0, Math.floor(top / H) - 4), to = Math.min(this.items.length, Math.ceil((top + height) / H) + 4);
    this.drawn = [from, to];
    this.around = this.neighbours();
    const keep = new Set();
    const width = this.canvas.clientWidth || 600, narrow = this.root.clientWidth < 560;
    const spare = width - (this.gutter + 1) * LANE - 26 - (narrow ? 0 : this.isWall ? 340 : 170) - this.columns.size * 92;
    this.room = Math.max(12, Math.floor(spare / this.charWidth));
    for (let index = from; index < to; index++) {
      const key = this.describe(index), element = this.kept.get(key) || this.row_(index);
      keep.add(key);
      this.kept.set(key, element);
      attrs(element, { "data-index": index, "aria-rowindex": index + 1, id: `${this.uid()}-${index}` });
      const y = `translateY(${index * H}px)`;
      if (element.style.transform !== y) element.style.transform = y;
      if (element.parentNode !== this.canvas) this.canvas.append(element);
    }
    for (const [key, element] of this.kept) if (!keep.has(key)) { element.remove(); this.kept.delete(key); }
    this.draw(from, to);
    const at = this.chosen();
    attrs(this.grid, { "aria-rowcount": this.items.length,
      "aria-activedescendant": at >= from && at < to ? `${this.uid()}-${at}` : null });
  }

  uid() { return (this.id = this.id || `fxl${Math.random().toString(36).slice(2, 8)}`); }

  neighbours() {
    const out = new Map();
    if (this.row === null) return out;
    for (const id of this.story.at(this.row, this.step).ins) out.set(id, "in");
    for (const id of this.users.get(this.row) || []) out.set(id, out.has(id) ? "both" : "out");
    return out;
  }

  lit(item) {
    const light = this.hover;
    if (!light || !light.ids) return false;
    return (item.group ? item.slots : [item.slot]).some((slot) => light.ids.has(slot.id));
  }

  // All that a row shows, as text: when it is the same the element stays.
  describe(index) {
    const item = this.items[index], picked = index === this.chosen() ? "s" : "";
    const base = [index, this.room, picked, this.lit(item) ? "l" : "", this.hits.includes(index) ? "h" : "",
      [...this.columns].join()];
    if (item.group) {
      const live = item.slots.filter((slot) => slot.st === 0).length;
      return [...base, item.group.key, live, this.marks(item).join(), item.slots.map((x) => this.around.get(x.id) || "").join("")].join("\x1f");
    }
    const { slot } = item, now = this.story.at(slot.id, this.step);
    return [...base, slot.id, slot.st, slot.mark, slot.strong, this.around.get(slot.id) || "", now.since, this.lineOf(slot), this.ends(slot),
      this.users.get(slot.id) || ""].join("\x1f");
  }

  marks(item) {
    const out = [0, 0, 0, 0, 0, 0];
    for (const slot of item.slots) if (slot.mark) out["+-~".indexOf(slot.mark) + (slot.strong ? 0 : 3)]++;
    return out;
  }

  ends(slot) {
    if (this.story.at(slot.id, this.step).letter !== "P") return "";
    if (this.endsOf !== this.frame) {
      this.endsOf = this.frame;
      this.given = this.frame.slots.filter((s) => s.st === 0 && this.story.at(s.id, this.step).letter === "P").map((s) => s.id);
    }
    const { given } = this;
    return (given[0] === slot.id ? "first" : "") + (given[given.length - 1] === slot.id ? "last" : "");
  }

  lineOf(slot) {
    const now = this.story.at(slot.id, this.step), text = this.story.text(now.line, this.step);
    if (now.letter !== "P" || slot.st !== 0) return (slot.inner ? "    " : "") + text;
    const ends = this.ends(slot), start = "def forward(self, ";
    return (ends.includes("first") ? start : " ".repeat(start.length)) + text + (ends.includes("last") ? "):" : ",");
  }

  row_(index) {
    const item = this.items[index], picked = index === this.chosen();
    const cell = (name, ...kids) => attrs(h("div", name, kids), { role: "gridcell" });
    const row = attrs(h("div", "fxl-row"), { role: "row", "aria-level": item.level, "aria-selected": picked ? "true" : "false" });
    if (index % 2) row.classList.add("odd");
    if (picked) row.classList.add("selected");
    if (this.lit(item)) row.classList.add("lit");
    if (this.hits.includes(index)) row.classList.add("hit");
    const gutter = cell("fxl-gap");
    if (item.group) {
      const { path, times, size } = item.group, [, name, type] = this.data.paths[path];
      const live = item.slots.filter((slot) => slot.st === 0).length, marks = this.marks(item), sums = h("span", "fxl-sums");
      ["+", "\u2212", "~"].forEach((mark, k) => {
        if (marks[k]) sums.append(h("b", `m${k}`, `${mark}${marks[k]} `));
        else if (marks[k + 3]) sums.append(h("span", `m${k}`, `${mark}${marks[k + 3]} `));
      });
      row.classList.add("fold");
      const near = item.slots.map((slot) => this.around.get(slot.id)).find(Boolean);
      add(row, gutter, cell("fxl-mark", ""), cell("fxl-line", "\u25b8 ", h("span", "nm", elide(name, this.room - 20)), ` ${type}`,
        times ? h("b", "", ` \u00d7${times}`) : null, h("span", "dim", `  ${plural(live, "row")} folded `), sums, this.badge(near)),
      cell("fxl-shape", ""));
      attrs(row, { "aria-expanded": "false", "aria-label": `${name} ${type}${times ? ` times ${times}` : ""}, ${plural(size, "row")} folded` });
      return row;
    }
    const { slot } = item, now = this.story.at(slot.id, this.step);
    row.classList.add(["live", "ghost", "empty"][slot.st]);
    if (slot.mark) row.classList.add({ "+": "plus", "-": "minus", "~": "tilde" }[slot.mark], slot.strong ? "strong" : "faint");
    const empty = slot.st === 2, near = this.around.get(slot.id);
    const text = empty ? "" : this.lineOf(slot), line = cell("fxl-line");
    const room = this.room - (near ? 9 : 0);
    if (picked && text.length > room) {
      line.classList.add("full");
      line.append(this.tokens(text, now));
    } else line.append(this.tokens(elide(text, room), now));
    if (near) line.append(this.badge(near));
    add(row, gutter, cell("fxl-mark", slot.mark === "-" ? "\u2212" : slot.mark), line,
      cell("fxl-shape", empty ? "" : elide(now.shape || "", this.isWall ? 24 : 26)));
    for (const metric of this.data.metrics) {
      if (!this.columns.has(metric.id)) continue;
      const value = metric.values[slot.id], box = cell("fxl-metric");
      if (value !== undefined && slot.st === 0) {
        const bar = h("i");
        bar.style.width = `${Math.max(1, (100 * value) / (metric.max || 1))}%`;
        add(box, bar, h("span", "", `${short(value)}${metric.unit}`));
      }
      row.append(box);
    }
    if (empty) return attrs(row, { "aria-label": "a row that a later step makes" });
    const said = slot.st === 1 ? `${now.name}, erased` : `${now.name}, ${OPS[now.letter]}`;
    const word = { "+": "created", "-": "erased", "~": "changed" }[slot.mark];
    const names = (list) => list.map((id) => this.nameOf(id)).join(", ") || "nothing";
    return attrs(row, { "aria-label": `${said}: ${text}${now.shape ? ` ${now.shape}` : ""}${word ? `, ${word}${slot.strong ? " in this step" : " earlier"}` : ""}; `
      + `reads ${names(now.ins)}; read by ${names(this.users.get(slot.id) || [])}` });
  }

  badge(kind) {
    if (!kind) return null;
    return h("span", `fxl-badge ${kind}`, { in: "\u25c2 input", out: "\u25b8 reader", both: "\u25c2\u25b8 both" }[kind]);
  }

  // A line of code in colours; every piece is a text node.
  tokens(text, now) {
    const out = h("span"), pattern = /("[^"]*"|'[^']*')|(self(?:\.\w+)+)|\b(def|return|self|None|True|False)\b|(\b\d[\w.]*\b)|([^\W\d]\w*)/g;
    if (text.length > 4000) return add(out, text);
    const known = new Set(now.ins.map((id) => this.nameOf(id)));
    let last = 0, defined = false;
    for (const match of text.matchAll(pattern)) {
      const [all, string, path, word, number, name] = match;
      let kind = string ? "st" : path ? "tg" : word ? "kw" : number ? "nu" : "";
      if (name === now.name && !defined) { kind = "nm"; defined = true; } else if (name && known.has(name)) kind = "rf";
      if (!kind) continue;
      add(out, text.slice(last, match.index), h("span", kind, all));
      last = match.index + all.length;
    }
    return add(out, text.slice(last));
  }

  draw(from, to) {
    const H = this.rowHeight, { lane, end, back } = this.lane, cap = Math.min(this.laneRoom(), this.gutter);
    const x = (value) => LANE * (Math.min(value, cap) + 0.75), y = (row) => (row + 0.5) * H;
    const tone = (value) => (value >= cap ? "many" : `t${value % 6}`);
    const kids = [], glyphs = [], selected = this.chosen();
    const path = (d, name) => kids.push(svg("path", { d, class: name }));
    for (let row = 0; row < Math.min(to, end.length); row++) {
      if (!this.inputs[row]) continue;
      if (end[row] > row && end[row] >= from && row < to) {
        const bend = lane[end[row]] === lane[row] ? 0 : H * 0.8;
        path(`M${x(lane[row])} ${y(row)}V${Math.max(y(row), y(end[row]) - bend)}`, `e ${tone(lane[row])} ${row === selected ? "out" : ""}`);
      }
      if (row < from) continue;
      for (const producer of this.inputs[row]) {
        if (producer >= row) continue;
        const a = x(lane[producer]), b = x(lane[row]), name = producer === selected ? "out" : row === selected ? "in" : "";
        if (a !== b) path(`M${a} ${y(row) - H * 0.8}Q${a} ${y(row)} ${b} ${y(row)}`, `e ${tone(lane[producer])} ${name}`);
        else if (name === "in") path(`M${a} ${y(row) - H}V${y(row)}`, `e ${tone(lane[producer])} in`);
      }
    }
    const aside = x(Math.min(this.lane.width, cap)) + 2;
    for (const [row, ghost] of [...this.dangling, ...back]) {
      if (ghost === undefined || Math.max(row, ghost) < from || Math.min(row, ghost) >= to) continue;
      const start = this.inputs[ghost] ? x(lane[ghost]) : aside;
      path(`M${start} ${y(ghost)}C${start + 16} ${y(ghost)} ${x(lane[row]) + 24} ${y(row)} ${x(lane[row])} ${y(row)}`, "e bad");
    }
    if (this.row !== null && this.place.has(this.row)) {
      const here = this.place.get(this.row);
      for (const id of this.story.rows.get(this.row).from) {
        const old = this.place.get(id) ?? this.ghosts.get(id);
        if (old === undefined || old === here) continue;
        const start = this.inputs[old] ? x(lane[old]) : aside;
        path(`M${start} ${y(old)}C${start + 22} ${y(old)} ${x(lane[here]) + 22} ${y(here)} ${x(lane[here])} ${y(here)}`, "e ribbon");
      }
    }
    const r = Math.min(8, H / 2 - 3);
    for (let row = from; row < to; row++) {
      const item = this.items[row];
      if (item.group) {
        if (lane[row] >= 0) glyphs.push(svg("rect", { x: x(lane[row]) - r, y: y(row) - r, width: 2 * r, height: 2 * r, rx: 3, class: "g fold" }),
          svg("text", { x: x(lane[row]), y: y(row) }, item.group.times ? "\u00d7" : "\u2026"));
        continue;
      }
      if (item.slot.st === 2) continue;
      const { letter } = this.story.at(item.slot.id, this.step), ghost = item.slot.st === 1;
      const cx = ghost ? aside : x(lane[row]);
      glyphs.push(svg("circle", { cx, cy: y(row), r, class: ghost ? "g ghost" : `g o${letter === "." ? "D" : letter}` }),
        svg("text", { x: cx, y: y(row), class: ghost ? "ghost" : null }, letter));
    }
    attrs(this.lanes, { width: (this.gutter + 1) * LANE, height: this.items.length * H });
    this.lanes.replaceChildren(...kids, ...glyphs);
  }

  // The left pane: which line, which sentence, which verdicts, and what is known of the selected row.
  tell() {
    const { data, story } = this, step = story.steps[this.step], pass = step ? data.passes[step.s] : null;
    const hidden = this.guessing && this.step < story.last && !this.judged;
    const frames = step ? step.w : story.last && story.steps[1].s === 0 ? story.steps[1].w.map((w) => [...w.slice(0, 1), 0, ...w.slice(2)]) : [];
    const level = frames[this.level] ? this.level : 0, place = frames[level];
    this.sourceHead.replaceChildren(h("span", "", pass && pass.kind !== "pass" ? "model source" : "pass source"),
      ...frames.map((frame, k) => {
        const name = `${frame[0].split("/").pop()}${frame[1] ? `:${frame[1]}` : ""}`;
        const tab = button(`fxl-frame${k === level ? " on" : ""}`, name, `${frame[0]} line ${frame[1]}, in ${frame[2]}`, () => {
          this.level = k;
          this.tell();
        });
        return tab;
      }));
    this.listing(this.source, place, "p", step ? this.edited() : new Map());
    const id = this.row !== null ? this.row : step && !hidden && step.k !== "module" ? step.r : null, from = id === null ? null : story.rows.get(id).source;
    this.userHead.replaceChildren(from && from.length && pass && pass.kind === "pass" ? `model source \u00b7 ${from[0][0]}:${from[0][1]}` : "");
    this.listing(this.user, pass && pass.kind === "pass" && from ? from[0] : null, "u", new Map());
    const start = `start: ${data.title}, ${plural(this.frame.slots.filter((slot) => slot.st === 0).length, "node")}`;
    const opened = this.opened === undefined ? null : data.passes[this.opened];
    const said = opened && opened.quiet ? opened.sentence : step ? step.t : start;
    if (this.live.textContent !== said) this.live.textContent = said;
    this.live.classList.toggle("error", !!step && step.k === "error");
    this.change.replaceChildren(...(step ? this.changed(step) : []));
    const atEnd = pass && this.step === pass.last && pass.kind === "pass", same = atEnd || (opened && opened.quiet) ? (opened || pass).same : null;
    const line = (label, words, bad) => h("div", bad ? "bad" : "", `${label}: `, h("b", "", words));
    if (opened && !opened.quiet) this.opened = undefined;
    const verdicts = [];
    if (step && step.k !== "value" && step.k !== "error") {
      verdicts.push(line("well formed", step.wf ? `no: ${step.wf}` : "yes", !!step.wf));
      if (pass.kind === "pass")
        verdicts.push(line("same output", same ? same.text : atEnd ? "not checked" : "not checked inside a pass", !!same && same.verdict === "different"));
    }
    const report = opened && opened.quiet ? opened : atEnd ? pass : null;
    if (report && report.kept.length) {
      const list = h("details", "", attrs(h("summary", "", `${plural(report.kept.length, "note")} of ${report.name}: what was left alone`),
        { "data-lm-suppress-shortcuts": "true" }));
      list.append(h("ul", "", report.kept.map((text) => h("li", "", text))));
      verdicts.push(list);
    }
    this.verdicts.replaceChildren(...verdicts);
    this.opened = undefined;
    this.guess.replaceChildren(...(this.guessing ? this.quiz() : []));
    const note = ((this.host.get("notes") || {})[this.step]) || data.notes[this.step] || "";
    this.note.replaceChildren(...(note ? [h("b", "", "note "), note] : []));
    this.about();
  }

  // The rows that each source line edited in this pass, up to this step.
  edited() {
    const out = new Map(), s = this.story.pass(this.step);
    for (let j = this.story.span(s).first; j <= this.step; j++) {
      const step = this.story.steps[j];
      for (const place of step.w) {
        const key = `${place[3]}:${place[1]}`;
        if (!out.has(key)) out.set(key, new Set());
        for (const id of [step.r, ...(step.m || [])]) if (id !== null) out.get(key).add(id);
      }
    }
    return out;
  }

  listing(box, place, kind, counts) {
    const source = place && place[3] >= 0 ? this.data.sources[place[3]] : null;
    box.hidden = !place;
    if (!place) return;
    const key = source ? `${place[3]}` : `${place[0]}:${place[1]}`;
    if (box.dataset.key !== key) {
      box.dataset.key = key;
      box.replaceChildren(...(source ? source.text.replace(/\n$/, "").split("\n").map((text, k) => {
        const number = source.line + k, line = h("div", "fxl-code-line", h("span", "no", String(number)), h("span", "", text || " "));
        line.dataset.line = `${kind}${place[3]}:${number}`;
        return line;
      }) : [h("div", "dim", `${place[0]}:${place[1]} in ${place[2]} (no source stored)`)]));
    }
    for (const line of box.children) {
      const number = (line.dataset.line || "").slice(1), now = number === `${place[3]}:${place[1]}`;
      line.classList.toggle("now", now);
      line.classList.toggle("did", counts.has(number));
      line.classList.toggle("lit", !!this.hover && !!this.hover.lines && this.hover.lines.has(line.dataset.line));
      attrs(line, { "aria-current": now ? "true" : null });
      if (now && box.dataset.at !== number) {
        box.dataset.at = number;
        const y = line.offsetTop - box.offsetTop;
        if (y < box.scrollTop + 20 || y > box.scrollTop + box.clientHeight - 40) box.scrollTop = Math.max(0, y - box.clientHeight / 2);
      }
    }
  }

  changed(step) {
    const out = [], { story } = this, i = this.step, both = (before, after) => {
      if (before) out.push(h("div", "was", h("span", "mk", "\u2212 "), elide(before, 400)));
      if (after) out.push(h("div", "now", h("span", "mk", "+ "), elide(after, 400)));
    };
    if (step.k === "value") return this.value(step.v);
    if (step.k === "error" || step.k === "result") return out;
    for (const text of step.b || []) both(text, "");
    for (const text of step.a || []) both("", text);
    if (step.b || step.a) return out;
    const touched = step.k === "reroute" ? step.m : step.r === null ? [] : [step.r];
    for (const id of touched.slice(0, 5)) {
      const before = story.text(story.at(id, i - 1).line, i - 1), after = story.text(story.at(id, i).line, i);
      if (step.k === "create") both("", after);
      else if (step.k === "erase") both(before, "");
      else if (before !== after) both(before, after);
    }
    if (touched.length > 5) out.push(h("div", "dim", `and ${touched.length - 5} more`));
    return out;
  }

  // What a run computed here.
  value(v) {
    const out = [h("div", "", `${v.dtype || ""} ${v.shape || v.text || ""}`)];
    if (v.min !== undefined && v.min !== null)
      out.push(h("div", "", `min ${short(v.min)} \u00b7 mean ${short(v.mean)} \u00b7 max ${short(v.max)}`));
    if (v.histogram && v.histogram.length) {
      const top = Math.max(...v.histogram, 1), box = svg("svg", { class: "fxl-hist", viewBox: "0 0 160 40", role: "img",
        "aria-label": `histogram ${v.histogram.join(" ")}` });
      v.histogram.forEach((n, k) => box.append(svg("rect", { x: k * 10, y: 40 - (38 * n) / top, width: 9, height: (38 * n) / top })));
      out.push(box);
    }
    const facts = [];
    if (v.bytes !== undefined) facts.push(`${short(v.bytes)}B`);
    if (v.live_bytes !== undefined) facts.push(`${short(v.live_bytes)}B live`);
    if (v.seconds) facts.push(`${short(v.seconds * 1e3)} ms`);
    if (facts.length) out.push(h("div", "", facts.join(" \u00b7 ")));
    if (v.freed && v.freed.length) out.push(h("div", "", `freed here: ${v.freed.map((id) => this.nameOf(id)).join(", ")}`));
    return out;
  }

  about() {
    this.detail.hidden = this.row === null;
    if (this.row === null) return;
    const { story } = this, row = story.rows.get(this.row), now = story.at(this.row, this.step);
    const jump = (id) => button("fxl-link", elide(this.nameOf(id), 40), `select ${this.nameOf(id)}`, () => this.select(id));
    const list = (label, ids) => h("div", "", h("span", "dim", label), ids.length ? ids.slice(0, 12).map((id) => [jump(id), " "]) : "nothing",
      ids.length > 12 ? `and ${ids.length - 12} more` : "");
    const past = row.from.map((id) => id).filter((id) => typeof id === "number" && story.rows.has(id));
    const words = (this.row, row.from).map((id) => (typeof id === "number" ? this.nameOf(id) : id)).join(" + ");
    this.detail.replaceChildren(h("div", "full", h("b", "", elide(now.name, 200)), ` ${OPS[now.letter] || now.letter} `, h("code", "", story.text(now.line, this.step))),
      h("div", "", now.shape || "shape not known"), list("\u25c2 reads ", now.ins), list("\u25b8 read by ", this.users.get(this.row) || []));
    if (words) add(this.detail, h("div", "", h("span", "dim", "came from "), words, past.length ? h("span", "dim", " (dotted in the gutter)") : null));
    const { path, source } = row, module = path >= 0 ? this.data.paths[path] : null;
    if (module) this.detail.append(h("div", "", h("span", "dim", "in "), `${module[1]} ${module[2]}`));
    if (source.length) this.detail.append(h("div", "", h("span", "dim", "made at "), source.map(([file, line, name]) => `${file}:${line} ${name}`).join(" \u2190 ")));
  }

  chrome() {
    const { data, story } = this, step = story.steps[this.step], now = step ? step.s : -1;
    this.chips.forEach((chip, s) => {
      const pass = data.passes[s], count = pass.last - pass.first + 1;
      const text = s === now ? `${pass.name} ${this.step - pass.first + 1}/${count}` : `${pass.name} ${count > 0 ? count : 0}`;
      if (chip.firstChild.textContent !== text) chip.firstChild.textContent = text;
      chip.classList.toggle("on", s === now);
      attrs(chip, { "aria-current": s === now ? "step" : null });
    });
    const pass = data.passes[now < 0 ? 0 : now], live = this.frame.slots.filter((slot) => slot.st === 0).length;
    const start = step ? this.before(now) : live;
    this.counts.textContent = start === live ? plural(live, "node") : `nodes ${start} \u2192 ${live}`;
    this.strip.replaceChildren(...(pass ? pass.strip.map((text) => h("span", "", text)) : []));
    this.strip.hidden = !pass || !pass.strip.length || now < 0;
    const folded = this.items.reduce((sum, item) => sum + (item.group ? item.slots.filter((slot) => slot.st === 0).length : 0), 0);
    const legend = Object.entries(OPS).map(([letter, name]) => h("span", "", h("b", `o${letter === "." ? "D" : letter}`, letter), ` ${name}`));
    for (const [mark, words, name] of [["+", "created", "m0"], ["\u2212", "erased", "m1"], ["~", "changed", "m2"]])
      legend.push(h("span", "", h("b", name, mark), ` ${words}`));
    legend.push(h("span", "", "faint: earlier in this pass"));
    if (folded) legend.push(h("b", "", `${plural(folded, "row")} folded`));
    if (!this.gaps) legend.push(h("b", "", "gaps closed"));
    this.legend.replaceChildren(...legend);
    if (Number(this.slider.value) !== this.step) this.slider.value = this.step;
    const label = step ? `step ${this.step} of ${story.last} \u00b7 ${elide(step.c, 48)}` : `start, ${plural(story.last, "step")}`;
    this.code.textContent = label;
    attrs(this.code, { title: step ? `copy ${step.c}` : null });
    attrs(this.slider, { "aria-valuetext": label });
  }

  before(s) {
    const step = this.story.steps[this.step], p = step.k === "result" ? step.was : step.p, { first } = this.story.span(s);
    return this.story.slots(s, p).filter((slot) => slot.born < first).length;
  }

  click(event) {
    const row = event.target.closest("[data-index]");
    this.grid.focus({ preventScroll: true });
    if (!row) return;
    const item = this.items[row.dataset.index];
    if (item && (item.group || item.slot.st !== 2)) this.choose(Number(row.dataset.index));
    if (item && item.group && event.target.closest(".nm")) this.toggle();
  }

  // Hovering a row or a source line lights up the other two.
  light(what) {
    const key = what ? what.line || (what.row && (what.row.group ? what.row.group.key : what.row.slot.id)) : null;
    if (key === this.lightKey) return;
    this.lightKey = key;
    let hover = null;
    if (what && what.line) {
      const at = what.line.slice(1);
      let ids = new Set(this.edited().get(at) || []);
      if (what.line[0] === "u" || this.data.passes[this.story.pass(this.step)]?.kind !== "pass")
        ids = new Set([...ids, ...this.frame.slots.map((slot) => slot.id).filter((id) => this.story.rows.get(id).source.some((w) => `${w[3]}:${w[1]}` === at))]);
      hover = { ids, lines: new Set([what.line]) };
    } else if (what && what.row && what.row.slot) {
      const { id } = what.row.slot, lines = new Set();
      for (const [line, ids] of this.edited()) if (ids.has(id)) lines.add(`p${line}`);
      for (const w of this.story.rows.get(id).source) { lines.add(`u${w[3]}:${w[1]}`); lines.add(`p${w[3]}:${w[1]}`); }
      hover = { ids: new Set([id]), lines };
    }
    this.hover = hover;
    this.paint();
    for (const box of [this.source, this.user])
      for (const line of box.children) line.classList.toggle("lit", !!hover && hover.lines.has(line.dataset.line));
  }

  chooseLine(line) {
    if (this.guessing && !this.judged && line[0] === "p") return this.judge({ line: line.slice(1) });
    const ids = this.edited().get(line.slice(1)), first = ids && [...ids].find((id) => this.place.has(id) || this.ghosts.has(id));
    const own = this.frame.slots.find((slot) => this.story.rows.get(slot.id).source.some((w) => `${w[3]}:${w[1]}` === line.slice(1)));
    if (line[0] === "p" && first !== undefined) return this.select(first);
    return own ? this.select(own.id) : undefined;
  }

  matching(query) {
    const wanted = query.toLowerCase(), out = [];
    const hit = (slot) => {
      if (slot.st === 2) return false;
      const now = this.story.at(slot.id, this.step), { source } = this.story.rows.get(slot.id);
      return [now.name, now.target, OPS[now.letter], now.shape, ...source.map((w) => `${w[0]}:${w[1]}`)]
        .some((text) => text && text.toLowerCase().includes(wanted));
    };
    this.items.forEach((item, index) => { if ((item.group ? item.slots : [item.slot]).some(hit)) out.push(index); });
    this.total = this.frame.slots.filter(hit).length;
    return out;
  }

  find(query, by) {
    this.query = query.trim();
    const code = this.query.match(/^(.*?):(\d+)(?:\/(.*))?$/s);
    if (by && code && this.data.passes.some((pass) => pass.name === code[1])) {
      this.go(Number(code[2]));
      if (code[3]) this.pick(code[3]);
      return;
    }
    this.hits = this.query ? this.matching(this.query) : [];
    if (this.hits.length) {
      const now = this.chosen();
      let next = by < 0 ? [...this.hits].reverse().find((at) => at < now) : this.hits.find((at) => (by ? at > now : at >= now));
      if (next === undefined) next = by < 0 ? this.hits[this.hits.length - 1] : this.hits[0];
      if (by && this.items[next].group) {
        this.folds.set(this.items[next].group.key, true);
        this.show();
        return this.find(query, by);
      }
      this.choose(next);
    } else this.paint();
    this.found.textContent = this.query ? `${this.hits.length ? `${this.hits.indexOf(this.chosen()) + 1} of ` : ""}${this.total || 0} found` : "";
  }

  predict(on) {
    if (this.guessing === on) return;
    this.guessing = on;
    this.judged = null;
    this.predictButton.classList.toggle("on", on);
    attrs(this.predictButton, { "aria-pressed": on ? "true" : "false" });
    this.host.set("predict", on);
    this.root.classList.toggle("predicting", on);
    if (this.frame) this.show();
  }

  quiz() {
    if (this.step >= this.story.last) return [h("div", "dim", "This was the last step.")];
    const show = button("fxl-b", "show me", "show the next step", () => { this.go(this.step + 1); });
    if (this.judged) return [h("div", this.judged.right ? "right" : "wrong", this.judged.text), show];
    const kinds = ["create", "reroute", "erase", "args", "move", "rename", "target", "module"];
    const buttons = kinds.map((kind) => button("fxl-b", kind, `guess: ${kind} at the selected row`, () => this.judge({ kind })));
    return [h("div", "", "What comes next? Select a row, then an edit; or pick a line of the pass."), h("div", "fxl-kinds", buttons, show)];
  }

  // Any edit that the pass may do next in the same match is a right guess.
  judge({ kind, line }) {
    const next = this.story.match(this.step), right = next.find((step) => {
      if (line) return (step.w || []).some((w) => `${w[3]}:${w[1]}` === line);
      const near = [step.r, ...(step.m || []), ...(step.e ? [step.e[2]] : [])];
      return step.k === kind && near.includes(this.row);
    });
    const first = next[0];
    this.judged = { right: !!right, text: right ? `Yes: ${right.t}` : `Not next. What comes: ${first ? first.t : "nothing"}` };
    this.tell();
    this.grid.focus({ preventScroll: true });
  }

  // Wall mode fills the window from the browser's top layer, so that no ancestor of a notebook clips it.
  wall(on) {
    if (this.isWall === on) return;
    this.isWall = on;
    this.root.classList.toggle("wall", on);
    if (on && this.root.showPopover) { this.root.setAttribute("popover", "manual"); if (this.root.isConnected) this.root.showPopover(); }
    else if (this.root.hasAttribute("popover")) { if (this.root.isConnected) this.root.hidePopover(); this.root.removeAttribute("popover"); }
    this.host.set("wall", on);
    this.resize();
    if (this.frame) { this.scrolled = false; this.show(); this.grid.focus({ preventScroll: true }); }
  }

  help() {
    this.helpBox.hidden = !this.helpBox.hidden;
    if (!this.helpBox.hidden) this.helpBox.querySelector("button").focus(); else this.grid.focus({ preventScroll: true });
  }

  // The kernel draws the classic picture; without one it says so.
  picture(reply) {
    if (!this.host.ask) return;
    if (!reply) {
      this.tab = this.tab === "code" ? "picture" : "code";
      this.tabButton.textContent = this.tab === "code" ? "picture" : "code";
      this.pane.hidden = this.tab === "code";
      this.grid.hidden = this.tab !== "code";
      if (this.tab === "code") { this.resize(); return; }
      this.pane.replaceChildren("drawing \u2026 (this needs the notebook's kernel)");
    }
    if (reply && reply.text) this.pane.replaceChildren(reply.text);
    else if (reply) {
      this.pane.replaceChildren(attrs(h("img"), { src: `data:image/svg+xml;base64,${reply.svg}`,
        alt: `graph of step ${reply.step}` }));
    }
    if (!reply) { this.asked = this.step; this.host.ask({ kind: "picture", step: this.step }); }
  }

  leave() {
    if (!this.helpBox.hidden) return this.help();
    if (document.activeElement === this.search) return this.grid.focus({ preventScroll: true });
    if (this.isWall) return this.wall(false);
    const outside = this.root.closest(".jp-Cell, .jp-Notebook");
    if (document.activeElement) document.activeElement.blur();
    if (outside && outside.tabIndex >= -1) outside.focus({ preventScroll: true });
    return undefined;
  }

  key(event) {
    if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey || event.key === "Tab") return;
    const { key, shiftKey } = event, typing = event.target === this.search;
    const onButton = event.target.tagName === "BUTTON" || event.target.tagName === "SUMMARY" || event.target.type === "checkbox";
    const done = () => { event.preventDefault(); event.stopPropagation(); };
    if (key === "Escape") { done(); this.leave(); return; }
    if (typing) {
      event.stopPropagation();
      if (key === "Enter") { event.preventDefault(); this.find(this.search.value, shiftKey ? -1 : 1); }
      return;
    }
    if (onButton && (key === "Enter" || key === " ")) { event.stopPropagation(); return; }
    const act = {
      ArrowLeft: () => (shiftKey ? this.goPass(-1) : this.go(this.step - 1)),
      ArrowRight: () => (shiftKey ? this.goPass(1) : this.go(this.step + 1)),
      PageUp: () => this.goPass(-1), PageDown: () => this.goPass(1),
      Home: () => this.go(0), End: () => this.go(this.story.last),
      n: () => this.nextChange(1), N: () => this.nextChange(-1),
      ArrowUp: () => this.along(-1), ArrowDown: () => this.along(1),
      i: () => this.toward("in"), u: () => this.toward("out"), I: () => this.toward("in"), U: () => this.toward("out"),
      Enter: () => this.toggle(), c: () => { this.gaps = !this.gaps; this.scrolled = false; this.show(); },
      p: () => this.predict(!this.guessing), w: () => this.wall(!this.isWall), "?": () => this.help(),
      "/": () => { this.search.focus(); this.search.select(); },
    };
    const run = act[key] || act[key.toLowerCase()];
    if (!run) return;
    done();
    run();
  }
}

// ---- the two hosts: a Jupyter widget, and a page of its own

async function unpack(bytes) {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

async function render({ model, el }) {
  const bytes = model.get("_story"), root = h("div", "fxl");
  el.append(root);
  const data = await unpack(bytes.buffer ? new Uint8Array(bytes.buffer, bytes.byteOffset, bytes.byteLength) : bytes);
  let own = false;
  const offs = [];
  const host = {
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
      const call = name === "picture" ? (message) => { if (message && message.kind === name) run(message); } : () => { if (!own) run(); };
      model.on(event, call);
      offs.push(() => model.off(event, call));
    },
    ask: (message) => model.send(message),
  };
  const viewer = new Viewer(root, data, host);
  return () => { viewer.close(); offs.forEach((off) => off()); };
}

// A page calls this with its story in base64; the address keeps the step (#12).
export async function open(root, packed, values) {
  const data = await unpack(Uint8Array.from(atob(packed), (c) => c.charCodeAt(0))), kept = { ...values };
  const at = Number(location.hash.slice(1));
  if (at) kept.step = at;
  return new Viewer(root, data, {
    get: (name) => kept[name], on: () => {},
    set: (name, value) => {
      kept[name] = value;
      if (name === "step") history.replaceState(null, "", value ? `#${value}` : location.pathname);
    },
  });
}

export default { render };
