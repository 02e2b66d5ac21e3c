"""Log lines that vLLM writes when it starts: version, model, arguments, token budget, KV cache.

All V1 releases are covered; newer ones print the size of the KV cache and the maximum concurrency on one
line, with the device's name in place of ``GPU``.
"""

import ast
import re

from schedtrace.model.printable import hide_secrets, shortened
from schedtrace.model.records import ServerStart

_ENGINE = re.compile(
    r"(?P<deed>Initializing a|Dumping input data for) V1 LLM engine "
    r"\(v(?P<version>[\w.+-]{1,80})\) with config: "
)
_CONFIG_MODEL = re.compile(r"\bmodel='([^'\n]{1,500})'")
_CONFIG_LENGTH = re.compile(r"\bmax_seq_len=(\d{1,12})\b")
_VERSION = re.compile(
    r"vLLM (?:API )?server version (?P<version>[\w.+-]{1,80})(?:, serving model (?P<model>\S{1,500}))?"
)
_ARGUMENTS = re.compile(r"non-default args: (\{.{0,100000}\})")
_BUDGET = re.compile(r"Chunked prefill is enabled with max_num_batched_tokens=(\d{1,12})\b")
_DEFAULT = re.compile(
    r"(?:Setting|Defaulting) (?P<name>max_num_seqs|max_num_batched_tokens) to (?P<value>\d{1,12}) for "
)
"""Pattern of a default for the user's GPU, which vLLM logs at debug level."""
_CACHE = re.compile(r"\bKV cache size: (\d[\d,]{0,20}) tokens")
_CONCURRENCY = re.compile(
    r"Maximum concurrency for (\d[\d,]{0,20}) tokens per request: (\d{1,9}(?:\.\d{1,6})?)x"
)
MARKERS = (
    b" V1 LLM engine (v",
    b"server version ",
    b"non-default args: {",
    b"Chunked prefill is enabled with max_num_batched_tokens=",
    b" usage context.",
    b"KV cache size: ",
    b"Maximum concurrency for ",
)
_MARKED = tuple(marker.decode() for marker in MARKERS)
_PLAIN = re.compile(r"'([a-z]\w{0,80})': ('[^'\\]{0,500}'|-?\d+(?:\.\d+)?|True|False|None)(?=[,}])")
LONGEST_VALUE = 200
"""Maximum number of characters of an argument's value that are kept."""


class StartLines:
    """Facts about a start, collected line by line."""

    def __init__(self) -> None:
        self.facts = ServerStart()
        self.lines = 0
        """Number of lines that contained a fact."""

    def begins_start(self, line: str) -> bool:
        """Return whether a line is one of the first lines of a start."""
        if not any(marker in line for marker in _MARKED):
            return False
        if _VERSION.search(line) or _ARGUMENTS.search(line):
            return True
        engine = _ENGINE.search(line)
        return engine is not None and engine["deed"].startswith("Initializing")

    def take(self, line: str) -> bool:
        """Store the facts in a line; return whether it contains any."""
        if not any(marker in line for marker in _MARKED):
            return False
        facts, before = self.facts, self.lines
        if match := _ENGINE.search(line):
            self._take_engine(match["version"], line[match.end() :])
        elif match := _VERSION.search(line):
            facts.vllm_version = match["version"]
            facts.model = match["model"] or facts.model
            self.lines += 1
        elif match := _ARGUMENTS.search(line):
            self._take_arguments(match[1])
        elif match := _BUDGET.search(line):
            facts.token_budget = int(match[1])
            self.lines += 1
        elif match := _DEFAULT.search(line):
            name = "max_num_seqs" if match["name"] == "max_num_seqs" else "token_budget"
            setattr(facts, name, int(match["value"]))
            self.lines += 1
        if match := _CACHE.search(line):
            facts.kv_cache_tokens = _count(match[1])
            self.lines += 1
        if match := _CONCURRENCY.search(line):
            facts.max_model_len, facts.max_concurrency = _count(match[1]), float(match[2])
            self.lines += 1
        return self.lines > before

    def _take_engine(self, version: str, config: str) -> None:
        self.facts.vllm_version = version
        if model := _CONFIG_MODEL.search(config):
            self.facts.model = model[1]
        if length := _CONFIG_LENGTH.search(config):
            self.facts.max_model_len = int(length[1])
        self.lines += 1

    def _take_arguments(self, text: str) -> None:
        arguments = arguments_in(text)
        if arguments is None:
            return
        facts = self.facts
        facts.arguments = {
            name: shortened(str(value), LONGEST_VALUE) for name, value in hide_secrets(arguments).items()
        }
        seats, budget, length = (
            value if type(value := arguments.get(name)) is int and value > 0 else None
            for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len")
        )
        facts.max_num_seqs = seats or facts.max_num_seqs
        facts.token_budget = budget or facts.token_budget
        facts.max_model_len = length or facts.max_model_len
        facts.model = facts.model or (str(arguments["model"]) if "model" in arguments else None)
        self.lines += 1


def arguments_in(text: str) -> dict[str, object] | None:
    """Return the arguments in a printed dict; None if the text is not a dict of plain values.

    Values that are not literals, such as an object's ``repr``, make the parser fail; the plain values are
    then taken one by one.
    """
    try:
        parsed = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        plain = _PLAIN.findall(text)
        return {name: ast.literal_eval(value) for name, value in plain} or None
    if not isinstance(parsed, dict):
        return None
    return {str(name): value for name, value in parsed.items()}


def _count(text: str) -> int:
    return int(text.replace(",", ""))
