import pytest

from schedtrace.model.printable import (
    HIDDEN,
    hide_in_text,
    hide_secrets,
    is_secret,
    vllm_environment,
    without_secrets,
)


@pytest.mark.parametrize(
    "name",
    [
        *("--hf-token", "--hf_token", "HF_TOKEN", "--api-key", "api_keys", "VLLM_API_KEY", "auth-token"),
        *("aws_secret_access_key", "ACCESS_KEY", "client_secret", "SECRET_KEY", "password", "--db-password"),
        *("--kv-transfer-config.kv_connector_extra_config.password", "access_token", "private-key", "passwd"),
    ],
)
def test_keys_tokens_and_passwords_are_secrets(name):
    assert is_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        *("--tokenizer", "--max-num-batched-tokens", "eos_token_id", "bos_token", "token_budget", "--seed"),
        *("api_key_file", "passwords_checked", "keypassword", "turkey", "--api-keyboard"),
    ],
)
def test_tokens_of_text_are_no_secrets(name):
    assert not is_secret(name)


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (["--api-key", "x", "--seed", "0"], ["--api-key", HIDDEN, "--seed", "0"]),
        (["--api-key=x=y", "run"], [f"--api-key={HIDDEN}", "run"]),
        (["--api-key", "x", "y", "--seed", "0"], ["--api-key", HIDDEN, HIDDEN, "--seed", "0"]),
        (["run", "--model", "m"], ["run", "--model", "m"]),
        (["--hf-token"], ["--hf-token"]),
        (["--hf-token", "--api-key", "x"], ["--hf-token", "--api-key", HIDDEN]),
        (["--api_key", "x", "--api_key=y"], ["--api_key", HIDDEN, f"--api_key={HIDDEN}"]),
        (["--api-key="], [f"--api-key={HIDDEN}"]),
        (["api-key", "x"], ["api-key", "x"]),
        ([], []),
    ],
)
def test_a_command_line_keeps_everything_but_the_values_of_secrets(command, shown):
    assert without_secrets(command) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ('{"password": "x", "port": 1}', '{"password": "(hidden)", "port": 1}'),
        ('{"accessToken":"a\\"b","n":1}', '{"accessToken":"(hidden)","n":1}'),
        ('{"password": 12, "n": 1}', '{"password": "(hidden)", "n": 1}'),
        ("KV(extra={'api_key': 'x', 'n': 1})", "KV(extra={'api_key': '(hidden)', 'n': 1})"),
        ("KV(password='x', n=1)", "KV(password='(hidden)', n=1)"),
        ("KV(password=None, eos_token='</s>')", "KV(password=None, eos_token='</s>')"),
        ("redis://me:x@host:1/0", "redis://(hidden)@host:1/0"),
        ("https://host/a?token=x&n=1", "https://host/a?token=(hidden)&n=1"),
        ("s3://bucket/model", "s3://bucket/model"),
        ("user@host", "user@host"),
    ],
)
def test_a_text_keeps_everything_but_secrets(text, shown):
    assert hide_in_text(text) == shown
    assert without_secrets(["--x", text]) == ["--x", shown]
    assert hide_secrets({"x": text}) == {"x": shown}


def test_a_command_line_is_not_changed_itself():
    command = ["--api-key", "x"]
    without_secrets(command)
    assert command == ["--api-key", "x"]


def test_settings_that_are_not_set_stay_so():
    options = {"hf_token": None, "api_key": "x", "seed": 0, "password": ""}
    assert hide_secrets(options) == {"hf_token": None, "api_key": HIDDEN, "seed": 0, "password": ""}


def test_only_variables_of_vllm_and_schedtrace_are_kept(monkeypatch):
    monkeypatch.setattr(
        "os.environ",
        {
            "VLLM_API_KEY": "x",
            "VLLM_B": "1",
            "HOME": "h",
            "SCHEDTRACE_DIR": "d",
            "HF_TOKEN": "y",
            "MY_VLLM_": "",
        },
    )
    told = vllm_environment()
    assert told == {"SCHEDTRACE_DIR": "d", "VLLM_API_KEY": HIDDEN, "VLLM_B": "1"}
    assert list(told) == sorted(told)
