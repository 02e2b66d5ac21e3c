# ruff: noqa: INP001  # a script to run, no package
"""Write the generated parts of ``docs/``: tables of fields and of causes, and JSON Schemas.

``python docs/generate.py`` rewrites them, ``python docs/generate.py --check`` fails if one is stale. A table
stands between ``<!-- fields: module.Struct -->`` and ``<!-- end -->``. A field's meaning is the docstring
below it in ``schedtrace/model/``; for a field without one it stands in ``fields.toml``. Those of a delta are
the step's. The tables between ``<!-- words: causes -->`` and ``<!-- end -->`` are the rows of
``schedtrace/model/causes.py``; each row can be linked to. Between ``<!-- evidence: <code> -->`` and
``<!-- end -->`` stand the fields of a finding's evidence, with the docstrings below them in its rule; between
``<!-- says: <code> -->`` and ``<!-- end -->`` what a finding says of its recorded sample. An example that
begins with ``$ schedtrace`` is what that command prints at 80 columns; those of the README beside ``docs/``
are filled in, too.
"""

import ast
import inspect
import json
import os
import re
import subprocess
import sys
import textwrap
import tomllib
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import msgspec

from schedtrace.diagnose import analyze, rules
from schedtrace.diagnose.rules import common
from schedtrace.model import (
    causes,
    checkup,
    comparison,
    delta,
    disaggregated,
    fleet,
    live,
    manifest,
    records,
    report,
    statistics,
    story,
    trace,
    trace_facts,
    what_if,
)
from schedtrace.model.message import Message, Value

DOCS = Path(__file__).parent
MODULES = {
    "trace": trace,
    "trace_facts": trace_facts,
    "manifest": manifest,
    "report": report,
    "statistics": statistics,
    "comparison": comparison,
    "story": story,
    "analyze": analyze,
    "what_if": what_if,
    "records": records,
    "live": live,
    "checkup": checkup,
    "disaggregated": disaggregated,
    "fleet": fleet,
}
LINES = (*(line for line in get_args(trace.AnyLine) if line is not trace.Line), delta.Delta)
"""Kinds of lines; a type checker takes a delta, which is made at run time, for any line."""
SCHEMAS = {
    "trace-line": (Union[LINES], "One line of engine-<rank>.jsonl"),  # noqa: UP007  # made at run time
    "front-end-line": (manifest.FrontEndLine, "One line of front-end-<pid>.jsonl"),
    "manifest": (manifest.Manifest, "run.json"),
    "report": (report.Report, "What schedtrace analyze --format json prints"),
    "comparison": (comparison.Comparison, "What schedtrace diff --format json prints"),
    "step": (story.StepStory, "What schedtrace step --format json prints"),
    "request": (story.Life, "What schedtrace request --format json prints"),
    "findings": (analyze.Catalogue, "What schedtrace findings --format json prints"),
    "queue": (live.EngineQueues, "What schedtrace queue --format json prints"),
    "doctor": (checkup.Checkup, "What schedtrace doctor --format json prints"),
    "records": (records.Records, "What schedtrace analyze --format json prints for weaker records"),
    "fleet": (fleet.FleetReport, "What schedtrace fleet --format json prints"),
    "what-if": (what_if.Replays, "What schedtrace replay, advise and sweep --format json print"),
}
MARKED = re.compile(r"(<!-- fields: (\w+\.\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
WORDS = re.compile(r"(<!-- words: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
EVIDENCE = re.compile(r"(<!-- evidence: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
SAYS = re.compile(r"(<!-- says: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
EXAMPLE = re.compile(r"(^```\n\$ schedtrace ([^\n]*)\n)(.*?)(^```$)", re.DOTALL | re.MULTILINE)
SHARED = (common.Waited,)
"""Base of evidence of many rules."""
SAMPLES = DOCS.parent / "tests" / "data" / "findings"
SAYS_WIDTH = 120
UNITS = [
    (r"_us$", "µs"),
    (r"_ms$", "ms"),
    (r"tokens_per_s$", "tokens/s"),
    (r"requests_per_s$", "requests/s"),
    (r"request_rate$", "requests/s"),
    (r"_s$", "s"),
    (r"_frac$", "fraction"),
    (r"kv_blocks|blocks_(needed|free)|free_blocks|admission_cap|speculative_blocks|full_blocks", "blocks"),
    (r"encoder_slots", "embeddings"),
    (r"^drafts", "tokens"),
    (r"tokens|budget|block_size|max_model_len|(in|out)put_len", "tokens"),
    (r"dummy_batches", "batches"),
    (r"steps$", "steps"),
    (r"num_preemptions|preemptions$", "preemptions"),
    (r"num_(running|waiting|not_ready|new|resumed|continued)|num_requests|num_prompts", "requests"),
    (r"_reqs$|_requests$|requests_(finished|aborted)|new_per_step", "requests"),
]
"""By name, first match: the unit of a number."""

Struct = type[msgspec.Struct]


def structs() -> dict[str, Struct]:
    """``module.Struct`` to the struct, for all that have fields of their own."""
    return {
        f"{short}.{name}": struct
        for short, module in MODULES.items()
        for name, struct in vars(module).items()
        if inspect.isclass(struct)
        and issubclass(struct, msgspec.Struct)
        and struct.__module__ == module.__name__
        and struct.__struct_fields__
        and struct is not delta.Delta
        and not issubclass(struct, live.Ask | live.Answer)
    }


def evidence_of(code: str) -> list[Struct]:
    """Return the kinds of evidence that the rule of this code makes.

    In a file of several rules, each kind stands above the function of its rule.
    """
    find = rules.KINDS[code].find
    finds = [rule.find for rule in rules.KINDS.values() if rule.find.__module__ == find.__module__]
    finds.sort(key=lambda function: function.__code__.co_firstlineno)
    modules = [inspect.getmodule(find)]
    if code == rules.interruption.RULE.code:  # of all ranks: in a file of its own
        modules.append(rules.rank_interruption)

    def rule_of(kind: type) -> Any:
        begin = inspect.getsourcelines(kind)[1]
        return next((each for each in finds if each.__code__.co_firstlineno > begin), finds[-1])

    kinds = [kind for module in modules for kind in vars(module).values() if inspect.isclass(kind)]
    evidence = [kind for kind in kinds if issubclass(kind, report.Evidence) and kind is not report.Evidence]
    return [kind for kind in evidence if kind not in SHARED and rule_of(kind) is find]


def nested(hint: Any) -> Struct | None:
    """Return the struct in a type: itself, or as an item of a list."""
    if inspect.isclass(hint) and issubclass(hint, msgspec.Struct):
        return hint
    return next((struct for part in get_args(hint) if (struct := nested(part))), None)


def evidence_rows(struct: Struct, before: str = "") -> Iterator[list[str]]:
    """Yield a row for each field of evidence, those of structs within it by ``field.name``."""
    meaning = docstrings(struct)
    for field in msgspec.structs.fields(struct):
        kind, inner = type_of(field.type), nested(field.type)
        unit = unit_of(field.name) if re.search(r"int|float", kind) else None
        shown = kind.replace(inner.__name__, "object") if inner else kind
        name, text = f"`{before}{field.name}`", _as_json(meaning[field.name]).replace("|", "\\|")
        yield [name, f"{shown}, {unit}" if unit else shown, text]
        if inner:
            yield from evidence_rows(inner, f"{before}{field.name}.")


def evidence_tables(code: str) -> str:
    """Return a table of fields for each kind of evidence of a finding."""
    tables = []
    for struct in evidence_of(code):
        about = _as_json(str(struct.__doc__).splitlines()[0])
        tables.append(f"{about}\n\n" + _rows(["field", "type", "meaning"], [*evidence_rows(struct)]))
    return "\n".join(tables)


def docstrings(struct: Struct) -> dict[str, str]:
    """Return the strings that stand below the fields of ``struct``, inherited fields included."""
    inherited = [docstrings(base) for base in struct.__bases__ if base not in (msgspec.Struct, object)]
    body = ast.parse(inspect.getsource(struct)).body[0]
    assert isinstance(body, ast.ClassDef)  # noqa: S101  # the source of a class is one
    found = {name: text for texts in inherited for name, text in texts.items()}
    for field, below in zip(body.body, body.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
        ):
            found[field.target.id] = " ".join(str(below.value.value).split())
    return found


def meanings() -> dict[str, dict[str, str]]:
    """Struct to field to meaning; every field has exactly one, from its docstring or ``fields.toml``."""
    given: dict[str, dict[str, str]] = tomllib.loads((DOCS / "fields.toml").read_text())
    every = {}
    for name, struct in structs().items():
        here = docstrings(struct)
        extra = given.pop(struct.__name__, {})
        missing = set(struct.__struct_fields__) - here.keys() - extra.keys()
        needless = extra.keys() - (set(struct.__struct_fields__) - here.keys())
        if missing or needless:
            sys.exit(f"{name}: no meaning for {sorted(missing)}, one too many for {sorted(needless)}")
        every[struct.__name__] = {field: _as_json(text) for field, text in (here | extra).items()}
    every["Delta"] = every["Step"]
    if given:
        sys.exit(f"fields.toml: no such struct: {', '.join(given)}")
    return every


def _as_json(text: str) -> str:
    """Python's words as those of JSON and Markdown."""
    return re.sub(r"\bNone\b", "null", text.replace("``", "`"))


def table(struct: Struct, meaning: dict[str, str]) -> str:
    """Return the Markdown table of a struct's fields."""
    omits = struct.__struct_config__.omit_defaults
    head = ["field", "type", "if absent", "meaning"] if omits else ["field", "type", "meaning"]
    rows = [head, ["---"] * len(head)]
    if tag := struct.__struct_config__.tag:
        rows.append(["`type`", f'`"{tag}"`', *([""] if omits else []), "Kind of line."])
    for field in msgspec.structs.fields(struct):
        kind = type_of(field.type)
        unit = unit_of(field.name) if re.search(r"int|float|Percentiles", kind) else None
        absent = [f"`{json.dumps(default_of(field))}`" if not field.required else ""] if omits else []
        text = meaning[field.name].replace("|", "\\|")
        rows.append([f"`{field.name}`", f"{kind}, {unit}" if unit else kind, *absent, text])
    return "".join(f"| {' | '.join(row)} |\n".replace("|  |", "| |") for row in rows)


def delta_table() -> str:
    """Return what a reader has to take for a field that a delta leaves out."""
    absent = {
        **dict.fromkeys(delta.CARRIED_FIELDS, "as in the step before"),
        **{name: f"`{other}` of the step before" for name, other in delta.BEFORE_FIELDS.items()},
        **dict.fromkeys(delta.OUTPUT_FIELDS, "`null`: the output has not come back"),
        "output_tokens": "as many as `total_requests` if `output_us` is there, else `null`",
        "changes": "every request got what is expected",
    }
    rows = [["field", "if absent"], ["---", "---"]]
    for field in msgspec.structs.fields(delta.Delta):
        if field.name in delta.EVENT_FIELDS:
            absent[field.name] = f"`{json.dumps(default_of(field))}`"
        rows.append([f"`{field.name}`", absent.get(field.name, "is never absent")])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def words_table(name: str) -> str:
    """Return the rows of ``model/causes.py``: ``causes``, their ``details``, or ``caps``."""
    return {"causes": _causes, "details": _details, "caps": _caps}[name]()


def _causes() -> str:
    rows = []
    for cause in causes.Cause:
        loops = [loop for loop in ("waiting", "running") if cause.entry.reason(loop)]
        rows.append([_anchored(cause), ", ".join(loops), *_entry(cause.entry)])
    return _rows(["cause", "loop", "meaning", "setting", "what to try"], rows)


def _details() -> str:
    rows = []
    for cause in causes.Cause:
        for detail, entry in cause.entry.details.items():
            rows.append([f"`{cause}`", f"`{detail}`", *_entry(entry)])
        about = ["The request's status in vLLM", "", ""]
        rows += [[f"`{cause}`", f"`{status}`", *about] for status in cause.entry.statuses]
    last = "what to try (if different from the cause's advice)"
    return _rows(["cause", "detail", "meaning", "setting", last], rows)


def _caps() -> str:
    rows = [[_anchored(cap), *_entry(cap.entry)] for cap in causes.Cap]
    return _rows(["cap", "meaning", "setting", "what to try"], rows)


def _anchored(word: causes.Cause | causes.Cap) -> str:
    return f'<a id="{word.page.partition("#")[2]}"></a>`{word}`'


def _entry(entry: causes.Entry) -> list[str]:
    setting = f"`{entry.setting}`" if entry.setting else ""
    return [entry.meaning, setting, entry.advice.format(seats_option="`--max-num-seqs`")]


def _rows(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(row)} |\n".replace("|  |", "| |").replace("|  |", "| |") for row in lines)


def sentences(code: str) -> str:
    """Return what a finding says of its recorded sample, a block of text with the fields' names before it."""
    lines = []
    for line in (SAMPLES / code / "sentences.txt").read_text().splitlines():
        word, text = line.split(": ", 1)
        first, rest = f"{word:9}", 9 * " "
        lines.append(textwrap.fill(text, SAYS_WIDTH, initial_indent=first, subsequent_indent=rest))
    return "```\n" + "\n".join(lines) + "\n```\n"


def printed(command: str) -> str:
    """Return what a command prints, run at the root of the repository."""
    done = subprocess.run(  # a command of our own pages
        [sys.executable, "-m", "schedtrace", *command.split()],
        cwd=DOCS.parent,
        env={**os.environ, "COLUMNS": "80", "PYTHONPATH": str(DOCS.parent)},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def default_of(field: Any) -> Any:
    """Return what a reader has to take for a field that is left out."""
    return field.default if field.default is not msgspec.NODEFAULT else field.default_factory()


def type_of(hint: Any) -> str:
    """Return a type in words."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in {types.UnionType, Union}:
        return " or ".join(type_of(argument) for argument in arguments)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin is list:
        return f"list of {type_of(arguments[0])}"
    if hint in (Any, type(None)):
        return "any" if hint is Any else "null"
    if origin is dict:
        return "object"
    return str(hint.__name__)


def unit_of(name: str) -> str | None:
    """Return the unit of a number of this name, where it has one."""
    return next((unit for pattern, unit in UNITS if re.search(pattern, name)), None)


def schema(kind: Any, title: str, every: dict[str, dict[str, str]]) -> str:
    """Return the JSON Schema of ``kind``, with the meaning of every field."""
    document = msgspec.json.schema(kind)
    document = _with_text_for_messages(document)
    if kind is report.Report:
        every = every | _add_evidence(document["$defs"])
        for name in {name for name in document["$defs"] if f"what_if.{name}" in structs()}:
            del document["$defs"][name]
        document["$defs"]["Replays"] = {"$ref": "what-if.schema.json"}
    for name, definition in document["$defs"].items():
        for field, text in every.get(name, {}).items():
            if field in definition.get("properties", {}):
                definition["properties"][field]["description"] = text
    first = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title}
    return json.dumps(first | document, indent=2) + "\n"


def _add_evidence(definitions: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Define every kind of evidence in the schema, and return the meanings of its fields by its name."""
    kinds = {kind: code for code in rules.KINDS for kind in evidence_of(code)}
    _, added = msgspec.json.schema_components(kinds, ref_template="#/$defs/{name}")
    del definitions["Evidence"]
    if both := definitions.keys() & added.keys():
        sys.exit(f"two structs of one name: {', '.join(sorted(both))}")
    definitions |= added
    definitions["Finding"]["properties"]["evidence"] = {
        "anyOf": [{"$ref": f"#/$defs/{kind.__name__}", "title": code} for kind, code in kinds.items()]
    }
    return {
        struct.__name__: {name: _as_json(text) for name, text in docstrings(struct).items()}
        for kind in kinds
        for struct in _with_nested(kind)
    }


def _with_nested(struct: Struct) -> Iterator[Struct]:
    yield struct
    for field in msgspec.structs.fields(struct):
        if inner := nested(field.type):
            yield from _with_nested(inner)


def _with_text_for_messages(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema with messages as JSON has them: objects with their text."""
    definitions = schema["$defs"]
    if Message.__name__ not in definitions:
        return schema
    for kind in (Message, *get_args(Value)):
        definitions.pop(kind.__name__, None)
    definitions["Message"] = {
        "title": "Message",
        "type": "object",
        "properties": {"text": {"type": "string", "description": "The sentence; empty where there is none."}},
        "required": ["text"],
    }
    return _with_default_text(schema)


def _with_default_text(schema: Any) -> Any:
    """Return the schema with the defaults of messages as JSON has them."""
    if isinstance(schema, list):
        return [_with_default_text(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    changed = {name: _with_default_text(item) for name, item in schema.items()}
    if isinstance(default := changed.get("default"), dict) and "template" in default:
        changed["default"] = {"text": ""}
    return changed


def generated() -> Iterator[tuple[Path, str]]:
    """Every file with generated parts, and what it should hold.

    A struct that no page shows ends the script: nothing may be left undocumented.
    """
    every, known = meanings(), structs()
    shown: set[str] = set()

    def fill(match: re.Match[str]) -> str:
        name = match[2]
        if name == "delta.Delta":
            return f"{match[1]}\n{delta_table()}\n{match[3]}"
        shown.add(name)
        return f"{match[1]}\n{table(known[name], every[known[name].__name__])}\n{match[3]}"

    for page in [*sorted(DOCS.rglob("*.md")), DOCS.parent / "README.md"]:
        text = page.read_text()
        if any(kind.search(text) for kind in (MARKED, WORDS, EVIDENCE, SAYS, EXAMPLE)):
            filled = WORDS.sub(lambda match: f"{match[1]}\n{words_table(match[2])}\n{match[3]}", text)
            filled = EVIDENCE.sub(
                lambda match: f"{match[1]}\n{evidence_tables(match[2])}\n{match[3]}", filled
            )
            filled = SAYS.sub(lambda match: f"{match[1]}\n{sentences(match[2])}\n{match[3]}", filled)
            filled = EXAMPLE.sub(lambda match: f"{match[1]}{printed(match[2])}{match[4]}", filled)
            yield page, MARKED.sub(fill, filled)
    if left_out := known.keys() - shown:
        sys.exit(f"no page has the fields of {', '.join(sorted(left_out))}")
    for name, (kind, title) in SCHEMAS.items():
        yield DOCS / "schema" / f"{name}.schema.json", schema(kind, title, every)


def main() -> None:
    """Rewrite what is stale; with ``--check`` only say so."""
    check = "--check" in sys.argv[1:]
    stale = [(path, text) for path, text in generated() if not path.exists() or path.read_text() != text]
    for path, text in stale:
        sys.stdout.write(f"{'stale' if check else 'wrote'}: {path.relative_to(DOCS.parent)}\n")
        if not check:
            path.write_text(text)
    if check and stale:
        sys.exit("run: python docs/generate.py")


if __name__ == "__main__":
    main()
