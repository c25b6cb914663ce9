"""What does one say about a row, and about a step? The words of the explorer, in one place.

`expression` gives the right-hand side of a row's line as the generated code has it (paper section
4.3), in pieces, so that names can be filled in later. The other functions build the one sentence of
a step: line, act, before and after, consequence.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from fxlab.core.node import target_text as target_of_function

if TYPE_CHECKING:
    from fxlab.explorer.frames import State

BINARY = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "truediv": "/",
    "floordiv": "//",
    "mod": "%",
    "pow": "**",
    "matmul": "@",
    "and_": "&",
    "or_": "|",
    "xor": "^",
    "lshift": "<<",
    "rshift": ">>",
    "eq": "==",
    "ne": "!=",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
}
UNARY = {"neg": "-", "pos": "+", "invert": "~", "not_": "not "}
PREFIXES = (("torch.nn.functional.", "F."), ("torch._C._nn.", "F."), ("builtins.", ""))
LONG = 80
WORD = 24  # no word of a sentence is longer; a name may be
Name = Callable[[int], str]
Parts = list["str | int"]


def shown(value: Any) -> Parts:
    """A value of the schema as it stands in a line, in pieces."""
    if isinstance(value, list):
        return ["[", *_joined([shown(one) for one in value]), "]"]
    if not isinstance(value, dict):
        return [repr(value)]
    if "row" in value:
        return [value["row"]]
    if "text" in value:
        return [value["text"]]
    if "tuple" in value:
        inner = _joined([shown(one) for one in value["tuple"]])
        return ["(", *inner, ",)" if len(value["tuple"]) == 1 else ")"]
    if "slice" in value:
        return ["slice(", *_joined([shown(one) for one in value["slice"]]), ")"]
    pairs = [[*shown(key), ": ", *shown(one)] for key, one in value.get("dict", ())]
    return ["{", *_joined(pairs), "}"]


def _joined(pieces: Sequence[Parts]) -> Parts:
    out: Parts = []
    for piece in pieces:
        if out:
            out.append(", ")
        out.extend(piece)
    return out


def _call(args: Sequence[Any], kwargs: dict[str, Any]) -> Parts:
    pieces = [shown(one) for one in args]
    pieces += [[f"{key}=", *shown(one)] for key, one in kwargs.items()]
    return ["(", *_joined(pieces), ")"]


def _index(value: Any) -> Parts:
    """A subscript: slices with colons, a tuple without its parentheses."""
    if isinstance(value, dict) and "slice" in value:
        start, stop, step = value["slice"]
        parts: Parts = [*([] if start is None else shown(start)), ":"]
        parts += [] if stop is None else shown(stop)
        return parts if step is None else [*parts, ":", *shown(step)]
    if isinstance(value, dict) and len(value.get("tuple", ())) > 1:
        return _joined([_index(one) for one in value["tuple"]])
    return shown(value)


def path_text(path: str) -> str:
    """A module or attribute path as code: `self.layer1`, `getattr(self.downsample, "0")`."""
    text = "self"
    for atom in path.split("."):
        if atom.isidentifier() and not keyword.iskeyword(atom):
            text = f"{text}.{atom}"
        else:
            text = f"getattr({text}, {_quoted(atom)})"
    return text


def _quoted(text: str) -> str:
    plain = repr(text)
    return f'"{plain[1:-1]}"' if plain[0] == "'" and '"' not in plain else plain


def target_text(op: str, target: str) -> str:
    """A target in short: `F.gelu`, `self.conv1`, `.view`, `operator.add` as it is."""
    if op in ("call_module", "get_attr"):
        return path_text(target)
    if op == "call_method":
        return f".{target}"
    for prefix, short in PREFIXES:
        if target.startswith(prefix):
            return short + target[len(prefix) :]
    return target


def expression(state: State) -> Parts:
    """What a row computes, as code in pieces: text, and row ids where a name stands.

    A placeholder shows its parameter, an output its return statement.
    """
    op, target, args, kwargs = state.op, state.target, state.args, state.kwargs
    if op == "placeholder":
        parts: Parts = [target]
        if state.type:
            parts.append(f": {state.type}")
        if args:
            parts += [" = " if state.type else "=", *shown(args[0])]
        return parts
    if op == "output":
        return ["return ", *(shown(args[0]) if args else ["None"])]
    if op == "get_attr":
        return [path_text(target)]
    if op == "call_module":
        return [path_text(target), *_call(args, kwargs)]
    if op == "call_method":
        if args:
            return [*_operand(args[0]), f".{target}", *_call(args[1:], kwargs)]
        return [f".{target}", *_call(args, kwargs)]
    return _function(target, args, kwargs)


def _operand(value: Any) -> Parts:
    """A value where code needs an atom: numbers below zero and the like in parentheses."""
    text = shown(value)
    simple = len(text) == 1 and (not isinstance(text[0], str) or text[0][:1] not in "-+~")
    return text if simple else ["(", *text, ")"]


def _function(target: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Parts:
    module, _, name = target.rpartition(".")
    if module in ("operator", "_operator") and not kwargs:
        if name in BINARY and len(args) == 2:
            return [*_operand(args[0]), f" {BINARY[name]} ", *_operand(args[1])]
        if name in UNARY and len(args) == 1:
            return [UNARY[name], *_operand(args[0])]
        if name == "getitem" and len(args) == 2:
            return [*_operand(args[0]), "[", *_index(args[1]), "]"]
    plain = len(args) == 2 and isinstance(args[1], str) and args[1].isidentifier()
    if target in ("builtins.getattr", "getattr") and plain and not kwargs:
        return [*_operand(args[0]), f".{args[1]}"]
    return [
        target_text("call_function", target.replace("_operator.", "operator.", 1)),
        *_call(args, kwargs),
    ]


def text_of(parts: Parts, name: Name) -> str:
    """The pieces with names filled in."""
    return "".join(part if isinstance(part, str) else name(part) for part in parts)


def short(text: str, limit: int = LONG) -> str:
    """A text on one line, cut in the middle when it is long."""
    line = " ".join(text.split()) if "\n" in text or "\r" in text else text
    return line if len(line) <= limit else cut(line, limit)


def cut(text: str, room: int, share: float = 0.5) -> str:
    """A text in at most `room` characters: long names are cut first, and no word of a sentence.

    Args:
        text: What may be too long.
        room: Characters.
        share: How much of what is kept comes from the end.
    """
    if len(text) <= room:
        return text
    pieces = re.split(r"(\w+)", text)
    for k in sorted(range(len(pieces)), key=lambda k: len(pieces[k]), reverse=True):
        over = sum(map(len, pieces)) - room
        if over <= 0 or len(pieces[k]) <= WORD:
            break
        pieces[k] = middle_out(pieces[k], max(WORD, len(pieces[k]) - over), share)
    text = "".join(pieces)
    return text if len(text) <= room else middle_out(text, room, share, WORD)


def middle_out(text: str, room: int, share: float, word: int = 0) -> str:
    """A text without its middle; up to `word` characters more go, so that no word is cut."""
    tail = int((room - 1) * share)
    head = room - 1 - tail if share != 0.5 else tail
    begin, end = text[:head], text[len(text) - tail :]
    if word and re.match(r"\w\w", text[head - 1 : head + 1]):
        begin = re.sub(rf"\w{{1,{word}}}$", "", begin) or begin
    if word and re.match(r"\w\w", text[len(text) - tail - 1 : len(text) - tail + 1]):
        end = re.sub(rf"^\w{{1,{word}}}", "", end) or end
    return f"{begin}…{end}"


def ordinal(number: int) -> str:
    """1st, 2nd, 3rd, 4th, 11th, ..."""
    if number % 100 not in (11, 12, 13):
        return f"{number}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th') }"
    return f"{number}th"


def named(names: Sequence[str], limit: int = 4) -> str:
    """Names in a row, the rest counted: `relu, add and 3 more`."""
    kept = [short(name, 40) for name in names[:limit]]
    rest = len(names) - len(kept)
    return ", ".join(kept) + (f" and {rest} more" if rest else "")


def line_prefix(file: str, line: int, previous: str | None) -> str:
    """`fuse.py:47 ` where a file is first named, `:48 ` while it stays the same."""
    if not file:
        return ""
    base = file.rpartition("/")[2]
    return f":{line} " if previous == file else f"{base}:{line} "


def created(state: State, code: str, after: str | None) -> str:
    """`adds gelu = F.gelu(x) after x; nothing reads it yet`."""
    place = f"after {short(after, 40)}" if after else "at the start"
    if state.op == "output":
        return f"adds {short(code)} {place}"
    name = short(state.name, 40)
    what = f"the input {short(code)}" if state.op == "placeholder" else f"{name} = {short(code)}"
    return f"adds {what} {place}; nothing reads it yet"


def erased(name: str, code: str, readers: Sequence[str]) -> str:
    """`erases bn1, was self.bn1(conv1); nothing read it`."""
    end = f"{named(readers)} still read it" if readers else "nothing read it"
    if len(readers) == 1:
        end = f"{readers[0]} still reads it"
    return f"erases {short(name, 40)}, was {short(code)}; {end}"


def rerouted(old: str, new: str, users: Sequence[str], left: Sequence[str]) -> str:
    """`the 2 readers of bn1 (relu, add) now read conv1; nothing reads bn1 any more`."""
    old, new = short(old, 40), short(new, 40)
    if not users:
        return f"nothing read {old}, so nothing reads {new} in its place"
    if len(users) == 1 and not left:
        who = f"the reader of {old} ({short(users[0], 40)}) now reads {new}"
    elif left:
        verb = "reads" if len(users) == 1 else "read"
        of = len(users) + len(left)
        who = f"{len(users)} of the {of} readers of {old} ({named(users)}) now {verb} {new}"
    else:
        who = f"the {len(users)} readers of {old} ({named(users)}) now read {new}"
    if left:
        return f"{who}; {named(left)} still {'reads' if len(left) == 1 else 'read'} {old}"
    return f"{who}; nothing reads {old} any more"


def moved(name: str, before: str | None, after: str | None) -> str:
    """`moves relu: after conv1 -> after bn1`."""

    def place(other: str | None) -> str:
        return f"after {short(other, 40)}" if other else "at the start"

    return f"moves {short(name, 40)}: {place(before)} -> {place(after)}"


def renamed(before: str, after: str) -> str:
    """`_1 is now called act`."""
    return f"{short(before, 40)} is now called {short(after, 40)}"


def target_name(target: Any) -> str:
    """A live target as the text that a state holds."""
    return target if isinstance(target, str) else target_of_function(target)


def article(noun: str) -> str:
    """A class's name with its article, as it is spoken: `a ReLU`, `an LSTM`, `an Embedding`."""
    if re.match(r"(?i)uni|use", noun):
        return f"a {noun}"
    vowels = "AEFHILMNORSX" if noun[:2].isupper() else "AEIOU"
    return f"{'an' if noun[:1].upper() in vowels else 'a'} {noun}"


def retargeted(name: str, before: State, after: State) -> str:
    """`act now calls F.gelu, was torch.relu`."""
    old, new = target_text(before.op, before.target), target_text(after.op, after.target)
    if before.type != after.type and (before.op, before.target) == (after.op, after.target):
        old, new = before.type or "none", after.type or "none"
        return f"{short(name, 40)}: type {short(old)} -> {short(new)}"
    if before.op != after.op:
        old, new = f"{old} ({before.op})", f"{new} ({after.op})"
    verb = "now calls" if after.op.startswith("call") else "is now"
    return f"{short(name, 40)} {verb} {short(new)}, was {short(old)}"


def rewritten(name: str, before: State, after: State, names: Name) -> str:
    """`add: 2nd argument bn3 -> conv3`."""

    def text(value: Any) -> str:
        return short(text_of(shown(value), names), 48)

    changes = []
    for index in range(max(len(before.args), len(after.args))):
        if index >= len(before.args):
            changes.append(f"{ordinal(index + 1)} argument none -> {text(after.args[index])}")
        elif index >= len(after.args):
            changes.append(f"{ordinal(index + 1)} argument {text(before.args[index])} -> none")
        elif before.args[index] != after.args[index]:
            old, new = text(before.args[index]), text(after.args[index])
            changes.append(f"{ordinal(index + 1)} argument {old} -> {new}")
    for key in dict.fromkeys([*before.kwargs, *after.kwargs]):
        old = text(before.kwargs[key]) if key in before.kwargs else "none"
        new = text(after.kwargs[key]) if key in after.kwargs else "none"
        if old != new:
            changes.append(f"{key} {old} -> {new}")
    if not changes:
        return f"{short(name, 40)}: its arguments were set again, to the same"
    more = f" and {len(changes) - 3} more" if len(changes) > 3 else ""
    return f"{short(name, 40)}: {', '.join(changes[:3])}{more}"


def restated(kind: str, before: dict[str, Any], after: dict[str, Any]) -> str:
    """`self.conv1: weight changed, bias none -> yes`: an edit of a module's state."""
    path = short(path_text(after.get("path") or before.get("path") or ""))
    old, new = before.get("value"), after.get("value")
    if new is None:
        if old is None:
            return f"{path}: nothing there, before or after"
        return f"{path}: gone, was {short(described(old))}"
    if old is None:
        return f"{path}: new, {short(described(new))}"
    changes = []
    if old["text"] != new["text"]:
        changes.append(f"{short(old['text'], 48)} -> {short(new['text'], 48)}")
    for key in dict.fromkeys([*old.get("tensors", {}), *new.get("tensors", {})]):
        one, other = old.get("tensors", {}).get(key), new.get("tensors", {}).get(key)
        if one == other:
            continue
        label = f"{key} " if key else ""
        if one is None:
            changes.append(f"{label}none -> yes")
        elif other is None:
            changes.append(f"{label}yes -> none")
        elif one[0] != other[0]:
            changes.append(f"{label}{one[0]} -> {other[0]}")
        else:
            changes.append(f"{label}changed" if key else "changed")
    if not changes:
        same = "another module of the same class and the same weights"
        changes.append(same if kind == "module" else "set again, to an equal value")
    more = f" and {len(changes) - 4} more" if len(changes) > 4 else ""
    return f"{path}: {', '.join(changes[:4])}{more}"


def described(value: dict[str, Any]) -> str:
    """A state value in a few words: `Conv2d`, `f32[64]`."""
    tensors = value.get("tensors", {})
    if list(tensors) == [""]:
        return str(tensors[""][0])
    return str(value["text"])


def value_sentence(name: str, fields: dict[str, Any], freed: Sequence[str]) -> str:
    """`relu is f32[1, 64]: 0 to 3.1, mean 0.4; frees bn1; 1.6 MB live`."""
    parts = [f"{short(name, 40)} is {fields['shape'] or 'no tensor'}"]
    if fields["mean"] is not None:
        parts[0] += f": {fields['min']:.3g} to {fields['max']:.3g}, mean {fields['mean']:.3g}"
    if fields.get("odd"):
        parts.append(f"{fields['odd']} numbers are infinite or NaN")
    if freed:
        parts.append(f"frees {', '.join(freed[:4])}" + (" ..." if len(freed) > 4 else ""))
    parts.append(f"{quantity(fields['live_bytes'], 'B')} live")
    return "; ".join(parts)


def quantity(value: float, unit: str = "") -> str:
    """A number in three digits with k, M, G or T, and its unit: `25.6 M`, `812 B`, `1.6 MB`."""
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}".rstrip()


def plural(count: int, noun: str) -> str:
    """`1 node`, `12 nodes`."""
    return f"{count} {noun}" if count == 1 else f"{count:,} {noun}s"
