"""What a log's name tells: ``profile_<HHMM>_bs<BATCH_SIZE>_in<INPUT_LENGTH>_out<OUTPUT_LENGTH>.log``."""

import re
from pathlib import Path

import msgspec

_NAME = re.compile(r"profile_(?P<at>\d{4})_bs(?P<bs>\d{1,12})_in(?P<in>\d{1,12})_out(?P<out>\d{1,12})")


class ProfileName(msgspec.Struct, frozen=True):
    """The workload by the name of its log; nobody checked it against the log."""

    at: str
    """``HHMM``."""
    batch_size: int
    input_len: int
    output_len: int

    @property
    def label(self) -> str:
        """``10:25 bs16 in1024 out64``."""
        at = f"{self.at[:2]}:{self.at[2:]}"
        return f"{at} bs{self.batch_size} in{self.input_len} out{self.output_len}"


def profile_name(path: Path) -> ProfileName | None:
    """The name taken apart; None if it has another form."""
    found = _NAME.fullmatch(path.stem)
    if found is None:
        return None
    return ProfileName(found["at"], int(found["bs"]), int(found["in"]), int(found["out"]))
