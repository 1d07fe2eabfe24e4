"""Plug-ins: modules outside this repository that register priors, networks, objectives, callbacks and others.

A plug-in is named by the person who starts a command, as in `plugins=[my_package.gp,./gp.py]`, or installed by them as
an entry point of the group `tabicl_train.plugins`. Nothing is imported because a file says so: checkpoints and exports
only record which plug-ins they need, and a command that lacks one says what to add.

A loose file becomes a module with the name of the file. The modules in its folder that it imports belong to it. Child
processes get the plug-ins of this one in the form `/absolute/gp.py#HASH`, and refuse a file that has changed since. So
does a process that unpickles an object which needs them. Other machines get the content of loose files.
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
ELEMENT = re.compile(r"""\s*(?:'([^']*)'|"([^"]*)"|([^,]+))""")  # of a list of sources; one with a comma is in quotes
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
        Its name on a command line: that of a module, or the absolute path of a file.
    version : str or None
        The version of the package that it belongs to, if it was installed.
    sha256 : str
        The hash of all source files of its module or package. Those of a loose file are that file and what it imports
        from its folder.
    files : tuple of str
        The names of these files, without folders outside the package. A loose file comes first.
    """

    module: str
    source: str
    version: str | None
    sha256: str
    files: tuple[str, ...]

    @property
    def argument(self) -> str:
        """The plug-in on the command line of a child process: with its hash."""
        return f"{self.source}#{self.sha256[:SHORT_HASH]}"

    def record(self) -> dict[str, Any]:
        """Return what checkpoints and exports record about it."""
        return {"module": self.module, "version": self.version, "sha256": self.sha256, "files": list(self.files)}


_named: dict[str, Plugin] = {}  # named by the user, by module


def load(sources: str | Path | Iterable[str | Path] | None) -> list[Plugin]:
    """Import plug-ins.

    Parameters
    ----------
    sources : str, Path, iterable of them, or None
        Names of modules, or paths of Python files. With `#` and a hash at the end, any other content is refused.

    Returns
    -------
    list of Plugin
        The plug-ins, in the same order.

    Raises
    ------
    ConfigError
        If one cannot be imported or has changed since it was imported, with the reason in one line.
    """
    return [_load_one(source) for source in _listed(sources)]


def find(sources: str | Path | Iterable[str | Path] | None) -> list[Plugin]:
    """Look up plug-ins as `load` does, without importing them or looking up their versions."""
    return [_find(source).plugin for source in _listed(sources)]


def _listed(sources: str | Path | Iterable[str | Path] | None) -> list[str]:
    if sources is None:
        return []
    if isinstance(sources, str | Path):
        return [str(sources)]
    return [str(source) for source in sources]


def named() -> list[Plugin]:
    """Return the plug-ins that the user of this process has named, in the order of loading."""
    return list(_named.values())


def arguments(hashes: bool = True) -> list[str]:
    """Return the arguments that load the same plug-ins in another process.

    Parameters
    ----------
    hashes : bool
        Whether the other process refuses plug-ins that have changed. Child processes do; a command that a person may
        repeat later has no hashes.

    Returns
    -------
    list of str
        One argument, or [] without plug-ins.
    """
    if not _named:
        return []
    sources = []
    for plugin in named():
        source = plugin.argument if hashes else plugin.source
        sources.append(f'"{source}"' if re.search(r"[,'\[\]]", source) else source)
    return [f"{OPTION}[{','.join(sources)}]"]


def take(words: Sequence[str]) -> list[str]:
    """Load the plug-ins that a command line names with `plugins=`, and return the other words.

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
    """A plug-in that was looked up but not imported."""

    plugin: Plugin
    path: Path | None  # of a loose file
    expected: str  # the beginning of the hash that it must have; "" for any


def _find(source: str) -> _Found:
    """Look up a plug-in by what names it on a command line; ConfigError if there is no such file or name."""
    # A file, or the name of a module.
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
        raise ConfigError([f"plugins: {place!r} is neither the name of a module nor a file whose name could be one"])
    # Its source files and their hash.
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
            raise ConfigError([f"plugins: {plugin.source} has changed since it was imported; restart Python"])
        return loaded


def refuse_changed() -> None:
    """Raise ConfigError if the files of a plug-in have changed since this process imported it."""
    for plugin in named():
        if _find(plugin.source).plugin.sha256 != plugin.sha256:
            raise ConfigError([f"plugins: {plugin.source} has changed since {COMMAND}"])


@dataclass(frozen=True)
class Needed:
    """Plug-ins in a pickle, placed before the objects that need them: unpickling it imports them.

    A file that has changed since is refused. Copying it within a process reads no files.

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
    """Import the plug-ins that a pickled object needs; ConfigError if one is missing or has changed."""
    since = "this object was pickled"
    for plugin in needed:
        loaded = _named.get(plugin.module)
        if loaded is not None and loaded.sha256 == plugin.sha256:
            continue  # the same content, perhaps in another folder
        if loaded is not None and loaded.source != plugin.source:
            raise ConfigError([f"plugins: {loaded.source} is not the {plugin.module} with which {since}"])
        if plugin.source.endswith(".py") and not Path(plugin.source).is_file():
            line = f"plugins: {since} with {plugin.source}, which does not exist here"
            name = Path(plugin.source).name
            raise ConfigError([f"{line}; first call tabicl_train.plugins.load(['FOLDER/{name}'])"])
        _load_one(f"{plugin.source}#{plugin.sha256}", since)
    return Needed(needed)


def build_after(needed: Needed, build: Callable, *arguments: Any) -> Any:
    """Call a function. `__reduce__` of objects that need plug-ins returns this, so that `needed` is unpickled first."""
    return build(*arguments)


def defining(classes: Iterable[type]) -> list[Plugin]:
    """Return the plug-ins named by the user in which classes are defined."""
    packages = {cls.__module__.partition(".")[0] for cls in classes}
    return [plugin for plugin in named() if plugin.module.partition(".")[0] in packages]


def sent() -> list[tuple[Plugin, list[bytes] | None]]:
    """Return the plug-ins of this process for other machines: a loose file with the contents of `Plugin.files`."""
    refuse_changed()
    contents: list[tuple[Plugin, list[bytes] | None]] = []
    for plugin in named():
        is_file = plugin.source.endswith(".py")
        folder = Path(plugin.source).parent
        contents.append((plugin, [(folder / name).read_bytes() for name in plugin.files] if is_file else None))
    return contents


def receive(contents: Iterable[tuple[Plugin, list[bytes] | None]]) -> None:
    """Import what `sent` returned on another machine.

    Parameters
    ----------
    contents : iterable
        Each plug-in with the contents of its files; None for a module that must be installed here.

    Raises
    ------
    ConfigError
        If a module is missing or differs here, or a file cannot be imported.
    """
    for plugin, content in contents:
        if plugin.module in _named:
            continue  # sent before
        if content is None:  # an installed module, which must be the same one here
            _load_one(f"{plugin.source}#{plugin.sha256}", since=f"{COMMAND}, or differs on this machine")
            continue
        # A loose file. Let Python find the modules that it imports, then execute it.
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
    """The content of a file that may not exist on this machine; stack traces show its lines."""

    def __init__(self, path: str, content: bytes) -> None:
        self.path = path
        self.content = content

    def get_filename(self, fullname: str) -> str:
        return self.path

    def get_source(self, fullname: str) -> str:
        return importlib.util.decode_source(self.content)


class _SentHelpers(importlib.abc.MetaPathFinder):
    """Finds the modules that were sent together with a loose file that imports them."""

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
    """Import a module, from a file if a path is given.

    Raises
    ------
    ConfigError
        If that fails, with the reason and the line of code, or if the file has the name of another module.
    """
    try:
        if path is None:
            return importlib.import_module(module)
        # A file that is imported already.
        has_name_of_another = f"plugins: {path} has the name of another module, {module}; rename the file"
        imported = sys.modules.get(module)
        if imported is not None:
            if _file_of(imported) != path.resolve():
                raise ConfigError([has_name_of_another])
            return imported
        # A file that Python does not find, or finds in a folder that it searches, as with python -m.
        spec = importlib.util.find_spec(module)
        if spec is None:
            return _execute(module, path)
        if spec.origin is None or Path(spec.origin).resolve() != path.resolve():
            raise ConfigError([has_name_of_another])
        return importlib.import_module(module)
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
    sys.modules[module] = loaded  # before it is executed, since dataclasses look up their module there
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
    """Return the folders `configs` next to plug-ins in their packages, without importing the plug-ins."""
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
    """Find a module; None if it or a package that contains it is broken, which `load_installed` reports."""
    try:
        return importlib.util.find_spec(module)
    except Exception:  # this imports the packages, which may fail in any way
        return None


def of_module(module: str) -> Plugin | None:
    """Return the plug-in that a module belongs to; None for this package itself.

    Parameters
    ----------
    module : str
        The module, as in `__module__` of a class.
    """
    if is_ours(module):
        return None
    # A script that registers something is a plug-in itself.
    if module == "__main__":
        file = _file_of(sys.modules["__main__"])
        files = with_helpers(file) if file is not None else []
        name = file.stem if file is not None else "__main__"
        return Plugin(name, str(file or name), None, hash_files(files), _names(files))
    if module in _named:
        return _named[module]
    # An installed package.
    top = module.partition(".")[0]
    files = source_files(top)
    return Plugin(top, top, _version(top), hash_files(files), _names(files))


def uses(records: Iterable[dict[str, Any]], kinds: Collection[str]) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """Yield the records of plug-ins in a file that are needed for things of some kinds, each with these things."""
    for record in records:
        if not isinstance(record, dict) or not {"module", "version", "files", "sha256", "uses"} <= record.keys():
            continue  # written by another program
        things = [f"{kind} {name}" for kind, name in record["uses"] if kind in kinds]
        if things:
            yield record, things


def name_of(record: dict[str, Any]) -> str:
    """Return the value of `plugins=` for the plug-in of a record, such as mine.py or my_package."""
    module = record["module"]
    return f"{module}.py" if record["files"][:1] == [f"{module}.py"] else module


def require(records: Iterable[dict[str, Any]], kinds: Collection[str], what: object) -> None:
    """Refuse to use a file whose plug-ins are not loaded; nothing is imported because a file names it.

    Parameters
    ----------
    records : iterable of dict
        What the file records about its plug-ins, see `Plugin.record` and `uses`.
    kinds : collection of str
        The kinds of things that are needed now, such as network and scaling.
    what : object
        The name of the file in messages.

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
            print_line(f"warning   the plug-in {module} has changed since {what} was written")
    if problems:
        raise ConfigError([*problems, *broken()])


def source_files(module: str) -> list[Path]:
    """Return the source files of a module, or of the package that contains it, in alphabetical order."""
    top = module.partition(".")[0]
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        spec = None
    # A loose file that was imported; a package; a single file in a folder that Python searches.
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
    """Return a loose file, followed by the modules in its folder that it imports, directly or indirectly.

    They are found in the source, without importing anything, so that all processes find the same ones: in import
    statements anywhere, and in texts such as `import_module("helper")`, "helper:Name" and "helper.py".
    """
    if {"site-packages", "dist-packages"} & set(file.parts):  # its neighbors are other packages
        return [file]
    files = [file]
    for path in files:  # grows in the loop
        for name in sorted(_imported_names(path, file.parent)):
            files += _modules_at(file.parent, name, known=set(files))
    return [file, *sorted(files[1:])]


def _imported_names(path: Path, folder: Path) -> set[str]:
    """Return the dotted names that the source of a module may import.

    Parameters
    ----------
    path : Path
        The source file, in the folder or below.
    folder : Path
        The folder in which the plug-in lies. Names that are relative to a package become relative to this folder.
    """
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # reported by the import
        return set()
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            # import a.b
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # from a import b, or from .a import b: one dot is the package of the file, each further one that above it.
            package: list[str] = []
            if node.level > 0:
                package += path.relative_to(folder).parts[: -node.level]
            if node.module:
                package.append(node.module)
            names.update(".".join([*package, alias.name]) for alias in node.names)
        elif isinstance(node, ast.Call) and _called_name(node) in IMPORTS:
            # importlib.import_module("a.b"), or __import__("a.b").
            for argument in node.args:
                if isinstance(argument, ast.Constant) and type(argument.value) is str:
                    names.add(argument.value)
        elif isinstance(node, ast.Constant) and type(node.value) is str:
            # "a.b:Name", or "a/b.py".
            match = PLACE.fullmatch(node.value)
            if match is not None:
                names.add(match[1] or match[2].replace("/", "."))
    return names


def _called_name(call: ast.Call) -> str:
    """Return the last part of the name of a called function, such as import_module; "" if it has no name."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    if isinstance(call.func, ast.Name):
        return call.func.id
    return ""


def _modules_at(folder: Path, name: str, known: Collection[Path]) -> Iterator[Path]:
    """Yield the files that importing a dotted name from a folder needs, except known ones.

    If the name is in a package, these are all files of the package.
    """
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
    """Return the names of files relative to the folder that contains all of them."""
    if not files:
        return ()
    folder = min((path.parent for path in files), key=lambda parent: len(parent.parts))
    return tuple(path.relative_to(folder).as_posix() for path in files)


def _version(module: str) -> str | None:
    """Return the version of the installed package that a module belongs to, or None."""
    top = module.partition(".")[0]
    packages = packages_distributions().get(top, [])
    return version(packages[0]) if packages else None
