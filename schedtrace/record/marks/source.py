"""Proof that a function's source text is the running code, so that a changed copy of it can be trusted.

The whole module is parsed and compiled, and the resulting code object of the function is compared with the
running one. The whole module is needed: compiled alone, a method loses its name mangling, its ``__class__``
cell, the module's ``__future__`` imports and, since Python 3.12, the way in which names imported by the
module are called. Nothing of the module is executed.
"""

import ast
import tokenize
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any


class UnprovableError(Exception):
    """Error: the source of a function cannot be proven to be the running code; the text states why."""


@dataclass(frozen=True)
class Proven:
    """Function with the syntax tree from which it was compiled."""

    function: FunctionType
    module: ast.Module
    """Module in which the bodies of all other functions are left out."""
    node: ast.FunctionDef
    """The function's node in ``module``; after a change, ``module`` must be compiled again."""
    file: str
    """File as shown to users: ``vllm/v1/core/sched/scheduler.py``."""

    def compiled(self) -> CodeType:
        """Return the function's code, compiled from the current state of ``module``."""
        path = self.function.__code__.co_filename
        code = compile(self.module, path, "exec", dont_inherit=True)
        return _find(code, self.function.__code__)


def prove(function: Any) -> Proven:
    """Return the proven source of ``function``.

    Raises:
        UnprovableError: If ``function`` is not a plain function, is decorated, has no source, or has a source
            that differs from the running code.
    """
    if type(function) is not FunctionType:
        msg = f"it is a {type(function).__name__}, not a plain function"
        raise UnprovableError(msg)
    if hasattr(function, "__wrapped__"):
        msg = "it is decorated"
        raise UnprovableError(msg)
    path = function.__code__.co_filename
    try:
        with tokenize.open(path) as file:
            module = ast.parse(file.read(), path)
    except (OSError, SyntaxError, UnicodeDecodeError, ValueError) as error:
        msg = f"its source cannot be read: {error}"
        raise UnprovableError(msg) from error
    proven = Proven(function, module, _node(module, function), _shown(function))
    if not _same(proven.compiled(), function.__code__):
        msg = f"{path} is not what runs: it, or the function, was changed after the import"
        raise UnprovableError(msg)
    return proven


def copy_of(function: FunctionType, code: CodeType) -> FunctionType:
    """Return a copy of ``function`` with other code and the same globals, defaults, closure and names.

    Raises:
        UnprovableError: If ``code`` has other free variables.
    """
    if code.co_freevars != function.__code__.co_freevars:
        msg = "its closure cannot be kept"
        raise UnprovableError(msg)
    copied = FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    copied.__qualname__, copied.__module__ = function.__qualname__, function.__module__
    return copied


def _node(module: ast.Module, function: FunctionType) -> ast.FunctionDef:
    """Return the function's definition; remove the bodies of all other functions in ``module``."""
    definitions = _thin_out(module, function.__code__)
    if len(definitions) != 1 or definitions[0].decorator_list:
        msg = f"no undecorated definition of it stands in line {function.__code__.co_firstlineno}"
        raise UnprovableError(msg)
    return definitions[0]


def _thin_out(node: ast.AST, code: CodeType) -> list[ast.FunctionDef]:
    definitions: list[ast.FunctionDef] = []
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            if isinstance(child, ast.FunctionDef) and (child.lineno, child.name) == (
                code.co_firstlineno,
                code.co_name,
            ):
                definitions.append(child)
            elif child.lineno <= code.co_firstlineno <= (child.end_lineno or 0):
                definitions += _thin_out(child, code)
            else:
                child.body = [ast.copy_location(ast.Pass(), child.body[0])]
        elif isinstance(child, ast.stmt | ast.excepthandler):
            definitions += _thin_out(child, code)
    return definitions


def _find(code: CodeType, wanted: CodeType) -> CodeType:
    """Return the code object with the wanted qualified name and line among the constants of ``code``."""
    for constant in code.co_consts:
        if not isinstance(constant, CodeType):
            continue
        if (constant.co_qualname, constant.co_firstlineno) == (wanted.co_qualname, wanted.co_firstlineno):
            return constant
        try:
            return _find(constant, wanted)
        except UnprovableError:
            continue
    msg = f"{wanted.co_qualname} is not in line {wanted.co_firstlineno} of {wanted.co_filename}"
    raise UnprovableError(msg)


_COMPARED = (
    "co_code",
    "co_names",
    "co_varnames",
    "co_freevars",
    "co_cellvars",
    "co_argcount",
    "co_posonlyargcount",
    "co_kwonlyargcount",
    "co_flags",
    "co_exceptiontable",
)


def _same(first: CodeType, second: CodeType) -> bool:
    """Return whether two code objects have the same instructions on the same lines."""
    return (
        all(getattr(first, name) == getattr(second, name) for name in _COMPARED)
        and list(first.co_lines()) == list(second.co_lines())
        and len(first.co_consts) == len(second.co_consts)
        and all(map(_same_constant, first.co_consts, second.co_consts))
    )


def _same_constant(first: Any, second: Any) -> bool:
    if isinstance(first, CodeType) and isinstance(second, CodeType):
        return _same(first, second)
    # 0.0 equals -0.0, and equal sets may be written in different orders
    return type(first) is type(second) and (
        repr(first) == repr(second) or (isinstance(first, frozenset) and first == second)
    )


def _shown(function: FunctionType) -> str:
    """Return the file's path without the folders that are specific to this machine."""
    module_file = function.__module__.replace(".", "/") + ".py"
    path = Path(function.__code__.co_filename)
    return module_file if path.as_posix().endswith(module_file) else path.name
