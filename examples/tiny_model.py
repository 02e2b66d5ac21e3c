"""Make a tiny Qwen3-shaped model folder, with a tokenizer made on the spot: no weights, no download.

``python examples/tiny_model.py FOLDER`` writes ``config.json`` (2 layers, hidden size 128, vocabulary 2,048)
and a byte-level BPE tokenizer with a chat template. Start vLLM on it with ``--load-format dummy``: the
answers are noise, but what the scheduler does depends on token counts only. ``--no-tokenizer`` leaves the
tokenizer out.
"""

import argparse
import json
import shutil
from pathlib import Path

CONFIG = Path(__file__).parent / "tiny-qwen3" / "config.json"
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Return a byte-level BPE: 256 bytes, three special tokens, and filler words up to ``vocab_size``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    special = ["<unk>", "<s>", "</s>"]
    tokens = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens += [f"w{number}" for number in range(vocab_size - len(tokens))]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def main() -> None:
    """Write the folder named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--no-tokenizer", action="store_true")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(CONFIG, arguments.folder / "config.json")
    if not arguments.no_tokenizer:
        write_tokenizer(arguments.folder, json.loads(CONFIG.read_text())["vocab_size"])
    print(f"wrote {arguments.folder}")


if __name__ == "__main__":
    main()
