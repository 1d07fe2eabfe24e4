"""Plug-ins: modules outside this repository that register priors, networks, objectives, callbacks and others.

A plug-in is named by the person who starts a command, as in `plugins=[my_package.gp,./gp.py]`, or installed by them as
an entry point of the group `tabicl_train.plugins`. Nothing is imported because a file says so: checkpoints and exports
only record which plug-ins they need, and a command that misses one says what to add.

A loose file becomes a module with the name of the file, and modules of its folder that it imports belong to it. Child
processes get the plug-ins of this one in the form `/absolute/gp.py#HASH` and refuse a file that has changed since; so
does whoever unpickles an object that needs them. Other machines get the content of loose files.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.abc
import importlib.util
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.machinery import ModuleSpec
from importlib.metadata import entry_points, packages_distributions, version
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from priors.registry import GROUP, LOCK, OLD_CONFIGS, broken, describe, is_ours, load_installed
from tabicl_train.console import print_line
from tabicl_train.errors import ConfigError
from tabicl_train.outputs import expand_home

__all__ = ["Plugin", "load"]

OPTION = "plugins="
SHORT_HASH = 16  # hexadecimal digits of a hash in a command
SOURCE = re.compile(r"(.+?)(?:#([0-9a-f]{8,64}))?")  # a module or a file, and perhaps its hash
ELEMENT = re.compile(r"""\s*(?:'([^']*)'|"([^"]*)"|([^,]+))""")  # of a list of sources; with a comma it is in quotes
IMPORTS = ("import_module", "__import__")
PLACE = re.compile(r"([\w.]+):\w+|([\w/]+)\.py")  # a text that names a module: "helper:Name" or "helper.py"
COMMAND = "the command that started this process"


@dataclass(frozen=True)
class Plugin:
    """A plug-in.

    Parameters
    ----------
    module : str
        Its name in Python.
    source : str
        What names it on a command line: the name of a module, or the absolute path of a file.
    version : str or None
        Of the package that it belongs to, if it was installed.
    sha256 : str
        Of all source files of its module or package; those of a loose file are that file and what it imports from its
        folder.
    files : tuple of str
        Their names, without folders outside the package; that of a loose file comes first.
    """

    module: str
    source: str
    version: str | None
    sha256: str
    files: tuple[str, ...]

    @property
    def argument(self) -> str:
        """The plug-in as a child process gets it: with its hash."""
        return f"{self.source}#{self.sha256[:SHORT_HASH]}"

    def record(self) -> dict[str, Any]:
        """Return what checkpoints and exports say of it."""
        return {"module": self.module, "version": self.version, "sha256": self.sha256, "files": list(self.files)}


_named: dict[str, Plugin] = {}  # named by the user, by module


def load(sources: str | Path | Iterable[str | Path] | None) -> list[Plugin]:
    """Import plug-ins.

    Parameters
    ----------
    sources : str, Path, iterable of them, or None
        Names of modules, or paths of Python files; `#` and a hash at the end refuse any other content.

    Returns
    -------
    list of Plugin
        In the same order.

    Raises
    ------
    ConfigError
        If one cannot be imported, or has changed since it was, with the reason in one line.
    """
    return [_load_one(source) for source in _listed(sources)]


def find(sources: str | Path | Iterable[str | Path] | None) -> list[Plugin]:
    """Look up plug-ins as `load` does, but import nothing; versions are not looked up."""
    return [_find(source).plugin for source in _listed(sources)]


def _listed(sources: str | Path | Iterable[str | Path] | None) -> list[str]:
    if sources is None:
        return []
    if isinstance(sources, str | Path):
        return [str(sources)]
    return [str(source) for source in sources]


def named() -> list[Plugin]:
    """Return the plug-ins that were named by the user of this process, in the order of loading."""
    return list(_named.values())


def arguments(hashes: bool = True) -> list[str]:
    """Return the arguments that load the same plug-ins in another process; none without plug-ins.

    Parameters
    ----------
    hashes : bool
        Whether the other process refuses plug-ins that have changed, as children do; a command that a person may
        repeat tomorrow has no hashes.
    """
    if not _named:
        return []
    sources = []
    for plugin in named():
        source = plugin.argument if hashes else plugin.source
        sources.append(f'"{source}"' if re.search(r"[,'\[\]]", source) else source)
    return [f"{OPTION}[{','.join(sources)}]"]


def take(words: Sequence[str]) -> list[str]:
    """Load the plug-ins that a command line names with `plugins=`, and return its other words.

    Raises
    ------
    ConfigError
        If one cannot be imported.
    """
    others = []
    for word in words:
        if word.startswith(OPTION):
            load(_sources(word.removeprefix(OPTION)))
        else:
            others.append(word)
    return others


def _sources(text: str) -> list[str]:
    """Return the elements of `[a,b]`, or the only one of `a`."""
    text = text.strip()
    if text.startswith("[") and text.endswith("]"):
        text = text[1:-1]
    sources = []
    for in_quotes, in_double_quotes, bare in ELEMENT.findall(text):
        source = (in_quotes or in_double_quotes or bare).strip()
        if source:
            sources.append(source)
    return sources


class _Found(NamedTuple):
    """A plug-in that was looked up, and not imported."""

    plugin: Plugin
    path: Path | None  # of a loose file
    expected: str  # the beginning of the hash that it must have; "" for any


def _find(source: str) -> _Found:
    match = SOURCE.fullmatch(source.strip())
    place, expected = match.groups("") if match else ("", "")
    place = expand_home(place)
    if place.endswith(".py"):
        path: Path | None = Path(place).absolute()
        module = Path(place).stem
    else:
        path = None
        module = place
    if path is not None and not path.is_file():
        raise ConfigError([f"plugins: there is no file {place}"])
    if not all(part.isidentifier() for part in module.split(".")):
        raise ConfigError([f"plugins: {place!r} is no name of a module, nor a file NAME.py whose name could be one"])
    files = with_helpers(path) if path is not None else source_files(module)
    plugin = Plugin(module, str(path or module), None, hash_files(files), _names(files))
    return _Found(plugin, path, expected)


def _load_one(source: str, since: str = COMMAND) -> Plugin:
    with LOCK:
        plugin, path, expected = _find(source)
        module = plugin.module
        loaded = _named.get(module)
        if loaded is not None and loaded.source != plugin.source:
            both = f"{plugin.source} and {loaded.source}"
            raise ConfigError([f"plugins: {both} are both the module {module}; rename one of them"])
        if not plugin.sha256.startswith(expected):
            raise ConfigError([f"plugins: {plugin.source} has changed since {since}"])
        if loaded is None:
            _import(module, path)
            loaded = replace(plugin, version=_version(module))
            _named[module] = loaded
        elif loaded.sha256 != plugin.sha256:
            raise ConfigError([f"plugins: {plugin.source} has changed since it was imported; start Python anew"])
        return loaded


def refuse_changed() -> None:
    """Raise ConfigError if the files of a plug-in have changed since this process has imported it."""
    for plugin in named():
        if _find(plugin.source).plugin.sha256 != plugin.sha256:
            raise ConfigError([f"plugins: {plugin.source} has changed since {COMMAND}"])


@dataclass(frozen=True)
class Needed:
    """Plug-ins in a pickle, before whatever needs them there: who unpickles it imports them.

    A file that has changed since is refused. Copies within a process look at no file.

    Parameters
    ----------
    plugins : tuple of Plugin
        What is needed.
    """

    plugins: tuple[Plugin, ...]

    def __reduce__(self) -> tuple:
        return _import_needed, (self.plugins,)

    def __deepcopy__(self, memo: dict) -> Needed:
        return self


def _import_needed(needed: tuple[Plugin, ...]) -> Needed:
    since = "this object was pickled"
    for plugin in needed:
        loaded = _named.get(plugin.module)
        if loaded is not None and loaded.sha256 == plugin.sha256:
            continue  # perhaps of another folder
        if loaded is not None and loaded.source != plugin.source:
            raise ConfigError([f"plugins: {loaded.source} is another {plugin.module} than when {since}"])
        if plugin.source.endswith(".py") and not Path(plugin.source).is_file():
            line = f"plugins: {since} with {plugin.source}, which is not there"
            name = Path(plugin.source).name
            raise ConfigError([f"{line}; before, call tabicl_train.plugins.load(['FOLDER/{name}'])"])
        _load_one(f"{plugin.source}#{plugin.sha256}", since)
    return Needed(needed)


def build_after(needed: Needed, build: Callable, *arguments: Any) -> Any:
    """Call a function; `__reduce__` returns this, with `needed` first, for objects that need plug-ins."""
    return build(*arguments)


def defining(classes: Iterable[type]) -> list[Plugin]:
    """Return the plug-ins, of those that this process has loaded by name, in which classes are defined."""
    packages = {cls.__module__.partition(".")[0] for cls in classes}
    return [plugin for plugin in named() if plugin.module.partition(".")[0] in packages]


def sent() -> list[tuple[Plugin, list[bytes] | None]]:
    """Return the plug-ins of this process for other machines, loose files with the contents of `Plugin.files`."""
    refuse_changed()
    contents: list[tuple[Plugin, list[bytes] | None]] = []
    for plugin in named():
        is_file = plugin.source.endswith(".py")
        folder = Path(plugin.source).parent
        contents.append((plugin, [(folder / name).read_bytes() for name in plugin.files] if is_file else None))
    return contents


def receive(contents: Iterable[tuple[Plugin, list[bytes] | None]]) -> None:
    """Import what `sent` returned on another machine; ConfigError if a module is missing or another one here."""
    for plugin, content in contents:
        if plugin.module in _named:
            continue  # sent before
        if content is None:  # an installed module, which must be the same one here
            _load_one(f"{plugin.source}#{plugin.sha256}", since=f"{COMMAND}, or is another one on this machine")
            continue
        if _hash(zip(plugin.files, content, strict=True)) != plugin.sha256:
            raise ConfigError([f"plugins: {plugin.source} is not what was sent"])
        folder = Path(plugin.source).parent
        first, *helpers = [_Sent(str(folder / name), data) for name, data in zip(plugin.files, content, strict=True)]
        if helpers:
            sys.meta_path.insert(0, _SentHelpers(dict(zip(plugin.files[1:], helpers, strict=True))))
        try:
            _execute(plugin.module, first)
        except (Exception, SystemExit) as error:  # a plug-in may fail in any way
            raise ConfigError([f"plugins: {plugin.source} cannot be imported: {describe(error)}"]) from error
        _named[plugin.module] = plugin


class _Sent(importlib.abc.ExecutionLoader):
    """The content of a file that may not be on this machine; stack traces show its lines."""

    def __init__(self, path: str, content: bytes) -> None:
        self.path = path
        self.content = content

    def get_filename(self, fullname: str) -> str:
        return self.path

    def get_source(self, fullname: str) -> str:
        return importlib.util.decode_source(self.content)


class _SentHelpers(importlib.abc.MetaPathFinder):
    """Finds the modules that were sent with a loose file which imports them."""

    def __init__(self, files: dict[str, _Sent]) -> None:
        self.files = files

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        place = fullname.replace(".", "/")
        for name in (f"{place}/__init__.py", f"{place}.py"):
            if name in self.files:
                return importlib.util.spec_from_loader(fullname, self.files[name], is_package=name.endswith("_.py"))
        is_folder = any(name.startswith(f"{place}/") for name in self.files)
        return ModuleSpec(fullname, None, is_package=True) if is_folder else None


def _import(module: str, path: Path | None) -> ModuleType:
    """Import a module, from a file if a path is given; ConfigError with the reason and line if that fails."""
    try:
        if path is None:
            return importlib.import_module(module)
        has_name_of_another = f"plugins: {path} has the name of another module, {module}; rename the file"
        imported = sys.modules.get(module)
        if imported is not None:
            if _file_of(imported) != path.resolve():
                raise ConfigError([has_name_of_another])
            return imported
        spec = importlib.util.find_spec(module)
        if spec is None:
            return _execute(module, path)
        if spec.origin is None or Path(spec.origin).resolve() != path.resolve():
            raise ConfigError([has_name_of_another])
        return importlib.import_module(module)  # its folder is searched, as with python -m
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # a plug-in may fail in any way
        raise ConfigError([f"plugins: {path or module} cannot be imported: {describe(error)}"]) from error


def _execute(module: str, source: Path | _Sent) -> ModuleType:
    if isinstance(source, Path):
        spec = importlib.util.spec_from_file_location(module, source)
    else:
        spec = importlib.util.spec_from_loader(module, source)
    assert spec is not None and spec.loader is not None  # the name ends in .py
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[module] = loaded  # before it runs: dataclasses look up their module there
    try:
        spec.loader.exec_module(loaded)
    except BaseException:
        del sys.modules[module]
        raise
    return loaded


def _file_of(module: ModuleType) -> Path | None:
    file = getattr(module, "__file__", None)
    return None if file is None else Path(file).resolve()


def config_folders() -> list[Path]:
    """Return the folders `configs` that lie beside plug-ins in their packages, without importing the plug-ins."""
    folders = []
    for module in [*(entry.module for entry in entry_points(group=GROUP)), *_named]:
        spec = _spec_of(module)
        if spec is not None and spec.origin and spec.parent:  # a loose file has no package
            folders.append(Path(spec.origin).parent / "configs")
    for entry in entry_points(group=OLD_CONFIGS):
        spec = _spec_of(entry.module)
        folders += [Path(place) for place in (spec and spec.submodule_search_locations) or ()]
    return [folder for folder in folders if folder.is_dir()]


def _spec_of(module: str) -> ModuleSpec | None:
    """Return where a module lies; None if it or a package that holds it is broken, which `load_installed` reports."""
    try:
        return importlib.util.find_spec(module)
    except Exception:  # the packages are imported, which may fail in any way
        return None


def of_module(module: str) -> Plugin | None:
    """Return the plug-in that a module belongs to; None for this package itself.

    Parameters
    ----------
    module : str
        As in `__module__` of a class. A script that registers something is the plug-in of its file.
    """
    if is_ours(module):
        return None
    if module == "__main__":
        file = _file_of(sys.modules["__main__"])
        files = with_helpers(file) if file is not None else []
        name = file.stem if file is not None else "__main__"
        return Plugin(name, str(file or name), None, hash_files(files), _names(files))
    if module in _named:
        return _named[module]
    top = module.partition(".")[0]
    files = source_files(top)
    return Plugin(top, top, _version(top), hash_files(files), _names(files))


def uses(records: Iterable[dict[str, Any]], kinds: Collection[str]) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """Yield the records of plug-ins, in a file, that things of some kinds need, and these things."""
    for record in records:
        if not isinstance(record, dict) or not {"module", "version", "files", "sha256", "uses"} <= record.keys():
            continue  # of another program
        things = [f"{kind} {name}" for kind, name in record["uses"] if kind in kinds]
        if things:
            yield record, things


def name_of(record: dict[str, Any]) -> str:
    """Return what `plugins=` needs for the plug-in of a record: mine.py or my_package."""
    module = record["module"]
    return f"{module}.py" if record["files"][:1] == [f"{module}.py"] else module


def require(records: Iterable[dict[str, Any]], kinds: Collection[str], what: object) -> None:
    """Refuse to use a file whose plug-ins are not loaded; nothing is imported because a file names it.

    Parameters
    ----------
    records : iterable of dict
        What the file says of its plug-ins, see `Plugin.record` and `uses`.
    kinds : collection of str
        The kinds of things that are needed now, such as network and scaling.
    what : object
        What messages call the file.

    Raises
    ------
    ConfigError
        With what to add to the command line.
    """
    load_installed()
    problems = []
    for record, things in uses(records, kinds):
        module = record["module"]
        if module not in sys.modules:
            name = name_of(record)
            add = f"add plugins=[{name}] to the command, in Python plugins=[{name!r}]"
            problems.append(f"{what} needs the plug-in {module} ({', '.join(things)}); {add}")
        elif module in _named and _named[module].sha256 != record["sha256"]:
            print_line(f"warning   the plug-in {module} is another one than when {what} was written")
    if problems:
        raise ConfigError([*problems, *broken()])


def source_files(module: str) -> list[Path]:
    """Return the source files of a module, or of the whole package that it is in, in the order of their names."""
    top = module.partition(".")[0]
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        file = _file_of(sys.modules[top]) if top in sys.modules else None
        return [file] if file is not None else []
    if spec.submodule_search_locations:
        files: list[Path] = []
        for folder in spec.submodule_search_locations:
            files += Path(folder).rglob("*.py")
        return sorted(files)
    if not spec.origin or not spec.origin.endswith(".py"):
        return []
    return with_helpers(Path(spec.origin))


def with_helpers(file: Path) -> list[Path]:
    """Return a loose file, and after it the modules of its folder that it imports, directly or through others.

    They are found in the source, without importing anything, so that all processes find the same ones: in statements,
    also of functions, and in texts such as `import_module("helper")`, "helper:Name" and "helper.py".
    """
    if {"site-packages", "dist-packages"} & set(file.parts):  # what lies beside it has a version of its own
        return [file]
    files = [file]
    for path in files:  # which grows
        for name in sorted(_imported_names(path, file.parent)):
            files += _modules_at(file.parent, name, known=set(files))
    return [file, *sorted(files[1:])]


def _imported_names(path: Path, folder: Path) -> set[str]:
    """Return the dotted names that the source of a module may import."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # which the import reports
        return set()
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = path.relative_to(folder).parts[: -node.level] if node.level else ()
            base = [*above, *([node.module] if node.module else [])]
            names |= {".".join([*base, alias.name]) for alias in node.names}
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in IMPORTS:
            names |= {text.value for text in node.args if isinstance(text, ast.Constant) and type(text.value) is str}
        elif isinstance(node, ast.Constant) and type(node.value) is str and (match := PLACE.fullmatch(node.value)):
            names.add(match[1] or match[2].replace("/", "."))
    return names


def _modules_at(folder: Path, name: str, known: Collection[Path]) -> Iterator[Path]:
    """Yield the files, beside known ones, that a dotted name imports if a folder is searched; of a package all."""
    parts = name.split(".")
    if parts[0] in sys.stdlib_module_names or is_ours(name):
        return
    for end, part in enumerate(parts, start=1):
        if not part.isidentifier():  # the * of `from helper import *`
            return
        place = folder.joinpath(*parts[:end])
        package, file = place / "__init__.py", place.with_name(f"{place.name}.py")
        if package.is_file():
            yield from set(place.rglob("*.py") if package not in known else ()).difference(known)
            return
        if file.is_file() and file not in known:
            yield file


def hash_files(files: Sequence[Path]) -> str:
    """Return the SHA-256 of the names and contents of files."""
    return _hash((name, path.read_bytes()) for name, path in zip(_names(files), files, strict=True))


def _hash(contents: Iterable[tuple[str, bytes]]) -> str:
    total = hashlib.sha256()
    for name, content in contents:
        total.update(f"{name} {len(content)}\n".encode())
        total.update(content)
    return total.hexdigest()


def _names(files: Sequence[Path]) -> tuple[str, ...]:
    """Return the names of files relative to the folder that holds them all; never a folder above it."""
    if not files:
        return ()
    folder = min((path.parent for path in files), key=lambda parent: len(parent.parts))
    return tuple(path.relative_to(folder).as_posix() for path in files)


def _version(module: str) -> str | None:
    """Return the version of the installed package that a module belongs to, or None."""
    top = module.partition(".")[0]
    packages = packages_distributions().get(top, [])
    return version(packages[0]) if packages else None
