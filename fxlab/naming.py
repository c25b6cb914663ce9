"""What does a word of the command line name: a model, a pass, an input? And what stopped it?

A name alone is one of the kit's own, and what is not there is told with what is; a file or a module
before a colon makes it anybody's. Also a signature is read here, so that what needs arguments is
told from what can be called as it is, and what a user's own code raised from what the kit did. The
paper has no command line.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import inspect
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fxlab.core.errors import is_users, quote


class CommandError(Exception):
    """What the command line named is not there, or is not what it should be."""


class WrongCommandLine(CommandError):
    """The command line is wrong whatever is there: a word that no option or name has."""


def load(name: str, home: str) -> Any:
    """Find what a word of the command line names.

    Args:
        name: A name in ``home``; or ``file.py:name``; or ``package.module:name``.
        home: The module of the kit whose own names need no prefix.

    Returns:
        The object. A file is imported under its own name, with its folder on the path, as if it
        had been run.

    Raises:
        CommandError: If there is no such file, module or name; it says what there is.

    Example:
        >>> load("MLP", "fxlab.models").__name__
        'MLP'
    """
    place, _, attribute = name.rpartition(":")
    place = place.rstrip(":")
    if not place:
        module = importlib.import_module(home)
        fits = makes_a_model if home == "fxlab.models" else takes_a_module_alone
        known = [word for word in module.__all__ if fits(getattr(module, word))]
        if attribute not in module.__all__:
            _tell_of_a_file(attribute)
            if "." in attribute:
                _tell_of_a_file(*attribute.rsplit(".", 1))
            raise CommandError(
                f"{home} has no {attribute}{nearest(attribute, known)}: "
                "give file.py:name, package.module:name or one of " + ", ".join(sorted(known))
            )
        return getattr(module, attribute)
    if place.endswith(".py"):
        if not attribute:
            _tell_of_a_file(place)
        module = _import_file(Path(place))
    else:
        try:
            module = importlib.import_module(place)
        except ModuleNotFoundError as error:
            _tell_of_a_file(place, attribute)
            if Path(place).exists():
                raise CommandError(f"{place} is no file of Python: that ends in .py") from error
            raise CommandError(f"can't import {place}: {error}") from error
    if not hasattr(module, attribute):
        path = _file(place)
        known = _names_in(path) if path.is_file() else _public(vars(module))
        has = f"; it has {', '.join(known) or 'no names'}" if path.is_file() else ""
        missing = attribute or "name: give one behind the colon"
        raise CommandError(f"{place} has no {missing}{nearest(attribute, known)}{has}")
    return getattr(module, attribute)


def nearest(word: str, known: Iterable[str]) -> str:
    """Ask whether a word that is not known is another one, mistyped or cut short.

    Example:
        >>> nearest("mlp", ["resnet50", "MLP"]), nearest("fuse", ["cse", "fuse_conv_bn"])
        (' (is it MLP?)', ' (is it fuse_conv_bn?)')
        >>> nearest("x", ["cse"])
        ''
    """
    names = {name.lower(): name for name in known}
    low = word.lower()
    close = difflib.get_close_matches(low, names, 1)
    close += [name for name in names if len(low) > 2 and low in name]
    return f" (is it {names[close[0]]}?)" if close else ""


def _public(names: Iterable[str]) -> list[str]:
    return [name for name in names if not name.startswith("_")]


def _file(text: str) -> Path:
    return Path(text if text.endswith(".py") else f"{text}.py")


def _tell_of_a_file(text: str, name: str = "") -> None:
    """Refuse a file without a name in it, or one without its ending.

    The file is read, not run: nobody has said yet what is wanted of it.

    Raises:
        CommandError: If there is such a file; if the text is that of a file, and there is none.
    """
    path = _file(text)
    if path.is_file():
        known = _names_in(path)
        if name in known:
            raise CommandError(f"write {path}:{name}")
        has = f"it has {', '.join(known) or 'no names'}"
        raise CommandError(f"write {path}:NAME{nearest(name, known)}; {has}")
    if text.endswith(".py"):
        raise CommandError(_no_file(path))


def _names_in(path: Path) -> list[str]:
    """List the functions, classes and public values that a file makes at its outermost level."""
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except ValueError as error:  # null bytes, in Python 3.11
        raise CommandError(f"{path} is no Python: {error}") from error
    found: list[str] = []
    for part in tree.body:
        if isinstance(part, ast.FunctionDef | ast.ClassDef):
            found.append(part.name)
        elif isinstance(part, ast.Assign | ast.AnnAssign):
            targets = part.targets if isinstance(part, ast.Assign) else [part.target]
            found += [one.id for one in targets if isinstance(one, ast.Name)]
    return _public(found)


def _no_file(path: Path) -> str:
    if path.is_dir():
        return f"{path} is a folder: give a file"
    others = [one.name for one in path.parent.glob("*.py") if one.is_file()]
    return f"there is no file {path}{nearest(path.name, others)}"


def can_take(value: Any, *arguments: Any) -> bool:
    """Say whether something can be called so; what tells nothing of its parameters may be."""
    try:
        inspect.signature(value).bind(*arguments)
    except TypeError:
        return False
    except ValueError:  # written in C
        return True
    return True


def makes_a_model(value: Any) -> bool:
    """Tell the models of the kit from what helps to make one."""
    return callable(value) and can_take(value)


def takes_a_module_alone(value: Any) -> bool:
    """Tell the passes of the kit, a GraphModule to a GraphModule, from its other functions."""
    if not inspect.isfunction(value) or not can_take(value, None):
        return False
    signature = inspect.signature(value)
    first, *others = signature.parameters.values()
    return (
        "Module" in str(first.annotation)
        and signature.return_annotation == "GraphModule"
        and all(one.kind is not inspect.Parameter.VAR_POSITIONAL for one in others)
    )


def _module_name(path: Path) -> str:
    """Name a file's module after the file, but not as another one: somebody may call it json.py."""
    loaded = sys.modules.get(path.stem)
    other = loaded is not None and getattr(loaded, "__file__", None) != str(path)
    taken = other or path.stem in sys.stdlib_module_names
    return f"{path.stem}_of_{path.parent.name}" if taken else path.stem


def _import_file(path: Path) -> Any:
    if not path.is_file():
        raise CommandError(_no_file(path))
    sys.path.insert(0, str(path.resolve().parent))
    name = _module_name(path.resolve())
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert spec is not None and spec.loader is not None  # the name ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        error.filename = error.filename or path.name  # unknown of a file that is no text
        raise
    return module


_DTYPES = {
    "f64": "float64", "f32": "float32", "f16": "float16", "bf16": "bfloat16", "i64": "int64",
    "i32": "int32", "i16": "int16", "i8": "int8", "u8": "uint8", "bool": "bool",
}  # fmt: skip


def example_input(text: str) -> Any:
    """Make a tensor as ``f32[1, 3, 224, 224]`` describes it.

    Args:
        text: One of f64, f32, f16, bf16, i64, i32, i16, i8, u8, bool, and the sizes in brackets.

    Returns:
        Normal random numbers, or zeros and ones for a dtype without fractions; the same each time.

    Raises:
        CommandError: If the text is not of that form, or there is no memory for so many numbers.

    Example:
        >>> example_input("i64[2, 3]").dtype, example_input("f32[4]").shape
        (torch.int64, torch.Size([4]))
    """
    import torch

    match = re.fullmatch(r"(\w+)\[([\d\s,]*)\]", text.strip())
    if match is None or match[1] not in _DTYPES:
        raise CommandError(
            f'an input is written like "f32[1, 3, 224, 224]", not "{text}"; '
            f"the first word is one of {', '.join(_DTYPES)}"
        )
    sizes = [int(size) for size in match[2].split(",") if size.strip()]
    dtype = getattr(torch, _DTYPES[match[1]])
    chance = torch.Generator().manual_seed(0)
    try:
        if dtype.is_floating_point:
            return torch.randn(sizes, generator=chance).to(dtype)
        return torch.randint(0, 2, sizes, generator=chance).to(dtype)
    except (RuntimeError, TypeError, OverflowError, MemoryError) as error:
        raise CommandError(f"{text} cannot be made: {str(error).splitlines()[0]}") from error


def told(error: BaseException) -> str:
    """Say what a user's own code raised: where, and what; empty if it is not theirs.

    Args:
        error: An exception that came out of the kit.

    Returns:
        The innermost line of a user's file and the error; for text that Python cannot compile, its
        place. Empty when the kit raised it, or what the kit called.

    Example:
        >>> told(KeyError("nobody's"))
        ''
    """
    kind = f"{type(error).__name__}: "
    if isinstance(error, SyntaxError):
        line = f":{error.lineno}" if error.lineno else ""
        return f"{Path(error.filename or '').name}{line}: {kind}{error.msg}"
    frames = traceback.walk_tb(error.__traceback__)
    places = [(f.f_code.co_filename, line, f.f_code.co_name) for f, line in frames]
    kit = str(Path(__file__).parent)
    ours = [place for place in places if place[0].startswith(kit) or _is_a_persons(place[0])]
    if isinstance(error, RecursionError):  # it is raised wherever the stack ends
        ours = [place for place in ours if not place[0].startswith(kit)]
    if not ours or ours[-1][0].startswith(kit):
        return ""
    return f"{quote(ours[-1])}\n  {kind}{error}"


def _is_a_persons(file: str) -> bool:
    """Say whether somebody wrote a file for themselves: neither Python nor pip brought it."""
    paths = sysconfig.get_paths()
    installed = (paths[key] for key in ("stdlib", "platstdlib", "purelib", "platlib"))
    return is_users(file) and not file.startswith(("<", *installed))
