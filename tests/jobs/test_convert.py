"""What a training has saved becomes a Hugging Face model, weight by weight, whatever ZeRO stage has written it."""

import json
import os
import pickle
import shutil
import subprocess
import sys
import zipfile
from argparse import Namespace
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.training

import torch  # noqa: E402

from tests.jobs.conftest import JOBS, STEPS, Attempt, free_port, older_step  # noqa: E402
from training.converting import comparing, conversion, models, pickles, trained  # noqa: E402
from training.converting.shards import open_shards  # noqa: E402
from training.errors import JobError  # noqa: E402

# Two processes make a small model, take two steps and save; the weights that they then hold are what must be found.
WRITE = """
import json, os, sys
import torch, deepspeed
from transformers import LlamaConfig, GPT2Config, AutoModelForCausalLM
from deepspeed.utils import safe_get_full_fp32_param
sys.path.insert(0, sys.argv[3])
from training import job
from training.deepspeed import skip_unbuilt_shm_comm
skip_unbuilt_shm_comm()
deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
for case in json.loads(sys.argv[2]):
    torch.manual_seed(1)
    if case["kind"] == "gpt2":   # tied, with buffers in older versions, an odd vocabulary
        config = GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=131, n_positions=32)
    else:
        config = LlamaConfig(vocab_size=131, hidden_size=24, intermediate_size=50, num_hidden_layers=2,
                             num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64)
    model = AutoModelForCausalLM.from_config(config)
    if case.get("freeze"):
        model.get_input_embeddings().weight.requires_grad_(False)
    if case.get("lora"):
        from peft import LoraConfig, get_peft_model
        base = os.path.join(sys.argv[1], case["name"] + "-base")
        if torch.distributed.get_rank() == 0:
            model.save_pretrained(base)
        model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False,
                                                 task_type="CAUSAL_LM"))
        config = model.peft_config["default"]
        config.base_model_name_or_path = base
    decayed = [p for n, p in model.named_parameters() if p.requires_grad and p.dim() > 1]
    others = [p for n, p in model.named_parameters() if p.requires_grad and p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    zero = {"stage": case["stage"], "stage3_param_persistence_threshold": 0, "sub_group_size": 700}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config={
        "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": case["bf16"]}, "zero_optimization": zero,
        "zero_allow_untested_optimizer": True, "steps_per_print": 10**9})
    for step in range(2):
        ids = torch.randint(0, 131, (1, 16), generator=torch.Generator().manual_seed(step + 10 * engine.global_rank))
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
    folder = os.path.join(sys.argv[1], case["name"])
    engine.save_checkpoint(folder, tag="global_step2")
    truth = {}
    for name, weight in model.named_parameters():
        full = safe_get_full_fp32_param(weight)
        if full is None:
            with deepspeed.zero.GatheredParameters([weight]):
                full = weight.detach().float().clone()
        truth[name] = full.detach().cpu().clone()
    if engine.global_rank == 0:
        config.save_pretrained(folder)
        torch.save(truth, os.path.join(folder, "truth.pth"))
    torch.distributed.barrier()
job.end_process(0)  # as the training scripts end: a thread of gloo may abort while Python is torn down
"""
CASES = [
    {"name": "llama-0-fp32", "kind": "llama", "stage": 0, "bf16": False},
    {"name": "llama-1-bf16", "kind": "llama", "stage": 1, "bf16": True},
    {"name": "llama-2-fp32", "kind": "llama", "stage": 2, "bf16": False},
    {"name": "llama-2-frozen", "kind": "llama", "stage": 2, "bf16": True, "freeze": True},
    {"name": "llama-2-lora", "kind": "llama", "stage": 2, "bf16": False, "lora": True},
    {"name": "llama-3-bf16", "kind": "llama", "stage": 3, "bf16": True},
    {"name": "llama-3-frozen", "kind": "llama", "stage": 3, "bf16": False, "freeze": True},
    {"name": "gpt2-1-fp32", "kind": "gpt2", "stage": 1, "bf16": False},
    {"name": "gpt2-3-fp32", "kind": "gpt2", "stage": 3, "bf16": False},
]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint of each case, written by two processes of the real DeepSpeed."""
    folder = tmp_path_factory.mktemp("zero")
    script = folder / "write.py"
    script.write_text(WRITE)
    words = (*("-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"), str(script))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        (sys.executable, *words, str(folder), json.dumps(CASES), str(JOBS)),
        env=environment, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return folder


def options(checkpoint: Path, output: Path, *words: str):
    import convert

    return convert.parser().parse_args([f"--checkpoint={checkpoint}", f"--output={output}", *words])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_each_weight_is_the_one_that_deepspeed_held(written: Path, case: dict[str, object]) -> None:
    """Bit by bit: fp32 master weights, frozen ones as they were, none put together from the wrong parts."""
    folder = written / str(case["name"])
    shards = open_shards(folder / "global_step2")
    truth = torch.load(folder / "truth.pth")
    assert set(truth) <= set(shards.weights)
    for name, expected in truth.items():
        found = shards.weights[name]()
        assert found.dtype == torch.float32 or case["name"] == "llama-2-frozen"
        assert torch.equal(found.float(), expected), name


@pytest.mark.parametrize("name", ["llama-2-frozen", "gpt2-3-fp32"])
def test_a_checkpoint_becomes_a_model_that_gives_the_same_logits(written: Path, tmp_path: Path, name: str) -> None:
    from transformers import AutoModelForCausalLM

    output = conversion.convert(options(written / name, tmp_path / "model", "--dtype=float32"), {})
    model = AutoModelForCausalLM.from_pretrained(str(output))
    truth = torch.load(written / name / "truth.pth")
    for weight_name, weight in model.named_parameters():
        assert torch.equal(weight, truth[weight_name]), weight_name
    record = json.loads((output / "converted.json").read_text())
    assert "maximum difference 0 " in record["check"]
    assert (output / "generation_config.json").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"], "nothing half done is left"


def test_shards_are_no_larger_than_asked_and_say_where_each_weight_is(written: Path, tmp_path: Path) -> None:
    from safetensors import safe_open

    arguments = options(written / "llama-3-bf16", tmp_path / "model", "--dtype=bfloat16", "--max_shard_size=6KB")
    output = conversion.convert(arguments, {})
    index = json.loads((output / "model.safetensors.index.json").read_text())
    shards = sorted(output.glob("model-*.safetensors"))
    assert len(shards) > 1
    found = {}
    for shard in shards:
        with safe_open(str(shard), framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= 6000
        assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
        found.update(dict.fromkeys(tensors, shard.name))
    assert found == index["weight_map"]
    config = json.loads((output / "config.json").read_text())
    assert "bfloat16" in (config.get("dtype"), config.get("torch_dtype"))


def test_a_model_that_answers_otherwise_never_becomes_visible(written: Path, tmp_path: Path) -> None:
    """bf16 rounds; a tolerance of nothing refuses that, and leaves nothing behind."""
    arguments = options(written / "llama-2-fp32", tmp_path / "model", "--dtype=bfloat16", "--tolerance=0")
    with pytest.raises(JobError, match="gives different results"):
        conversion.convert(arguments, {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", comparing.TOLERANCES)
def test_a_tenth_is_more_than_any_rounding(dtype: str) -> None:
    """What `--tolerance` is without the option: wide enough for the type, too narrow for a wrong weight."""
    of_checkpoint = torch.linspace(-3, 3, 64).reshape(4, 16)
    rounded = of_checkpoint.to(getattr(torch, dtype)).float()
    assert "maximum difference" in comparing.compare(of_checkpoint, rounded, comparing.TOLERANCES[dtype], dtype)
    with pytest.raises(JobError, match="gives different results"):
        comparing.compare(of_checkpoint, of_checkpoint * 0.9, comparing.TOLERANCES[dtype], dtype)


def test_without_a_check_the_weights_are_the_same(written: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    words = ("--dtype=bfloat16", "--check=none")
    output = conversion.convert(options(written / "llama-2-fp32", tmp_path / "model", *words), {})
    truth = torch.load(written / "llama-2-fp32" / "truth.pth")
    for name, weight in AutoModelForCausalLM.from_pretrained(str(output), dtype="auto").named_parameters():
        assert torch.equal(weight, truth[name].bfloat16()), name
    assert json.loads((output / "converted.json").read_text())["check"] == "not checked"


def test_a_universal_checkpoint_is_refused_and_never_taken_for_shards(written: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(written / "llama-2-fp32", tmp_path / "checkpoint")
    shutil.copytree(folder / "global_step2", folder / "global_step2_universal")
    (folder / "global_step2_universal" / "zero").mkdir()
    (folder / "latest").unlink()
    assert trained.find(folder, {}).weights == str(folder / "global_step2")
    with pytest.raises(JobError, match="is a universal checkpoint"):
        open_shards(folder / "global_step2_universal")


def test_a_missing_or_cut_shard_is_named(written: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(written / "llama-3-bf16", tmp_path / "checkpoint")
    shard = next(folder.glob("*/*rank_1*optim_states.pt"))
    whole = shard.read_bytes()
    shard.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(JobError, match=r"cannot read .*rank_1"):
        conversion.convert(options(folder, tmp_path / "model"), {})
    shard.unlink()
    with pytest.raises(JobError, match="the shards of 1 processes, but 2 processes wrote the checkpoint"):
        conversion.convert(options(folder, tmp_path / "model"), {})


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("intermediate_size", 60, "size mismatch"),
        ("num_hidden_layers", 3, "weights are missing"),
        ("num_hidden_layers", 1, "weights do not belong to the model"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(
    written: Path, tmp_path: Path, key: str, value: int, why: str
) -> None:
    config = json.loads((written / "llama-2-fp32" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, key: value}))
    arguments = options(written / "llama-2-fp32", tmp_path / "model", f"--config={tmp_path}")
    with pytest.raises(JobError, match="not a checkpoint of the model") as caught:
        conversion.convert(arguments, {})
    assert why in caught.value.why


def test_a_run_gives_its_newest_whole_checkpoint_with_tokenizer_and_template(whole: Attempt, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole.run, run)
    next((run / "checkpoints" / f"checkpoint-{STEPS}").rglob("*optim_states.pt")).write_bytes(b"")
    shutil.rmtree(run / "checkpoints" / "final")
    import convert

    output = conversion.convert(convert.parser().parse_args([f"--checkpoint={run}", "--dtype=float32"]), {})
    assert output == run / f"model-{older_step(run)}"
    names = {path.name for path in output.iterdir()}
    assert {
        "model.safetensors",
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "chat_template.jinja",
    } <= names
    assert not names & {"trainer_state.json", "complete.json", "latest", "optimizer.pt", "scheduler.pt"}
    with pytest.raises(JobError, match="exists"):
        conversion.convert(convert.parser().parse_args([f"--checkpoint={run}"]), {})
    broken = run / "checkpoints" / f"checkpoint-{STEPS}"
    with pytest.raises(JobError, match="is damaged"):
        conversion.convert(options(broken, tmp_path / "other"), {})


def test_an_adapter_is_merged_into_its_base(tmp_path: Path) -> None:
    """The merged model answers as the base with the adapter beside it."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=97, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    base = AutoModelForCausalLM.from_config(config)
    base.save_pretrained(str(tmp_path / "base"))
    base.name_or_path = str(tmp_path / "base")
    adapted = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    adapted.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.3)
    adapted.save_pretrained(str(tmp_path / "adapter"))
    output = conversion.convert(options(tmp_path / "adapter", tmp_path / "model", "--dtype=float32"), {})
    ids = torch.arange(20).unsqueeze(0)
    with torch.inference_mode():
        expected = adapted.eval()(input_ids=ids).logits
        merged = AutoModelForCausalLM.from_pretrained(str(output)).eval()(input_ids=ids).logits
    assert torch.allclose(expected, merged, atol=1e-5)
    assert not (output / "adapter_config.json").exists()


def test_of_an_adapter_the_saved_file_is_read_not_the_shards(written: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(written / "llama-2-lora", tmp_path / "checkpoint")
    for place in (folder, folder / "global_step2"):
        with pytest.raises(JobError, match="is neither"):
            trained.find(place, {}, shards_first=True)
    (folder / "adapter_model.safetensors").write_bytes(b"")
    for place in (folder, folder / "global_step2"):
        found = trained.find(place, {}, shards_first=True)
        assert (found.kind, found.weights) == (trained.ADAPTER, str(folder))


def call(module: str, name: str, argument: str | bytes) -> bytes:
    """A pickle of protocol 4, in which a name may have dots, that calls a function with one argument."""
    parts = [pickle.dumps(part, 4)[2:-1] for part in (module, name)]
    parts[0], parts[1] = (part[9:] if part[:1] == b"\x95" else part for part in parts)  # without FRAME
    value = pickle.dumps(argument, 4)[2:-1]
    value = value[9:] if value[:1] == b"\x95" else value
    return b"\x80\x04" + b"".join(parts) + b"\x93" + value + b"\x85R."


def archive(path: Path, data: bytes, **more: bytes) -> Path:
    """A file as torch.save writes it, around any pickle."""
    with zipfile.ZipFile(path, "w") as file:
        for name, content in {"data.pkl": data, "version": b"3\n", "byteorder": b"little", **more}.items():
            file.writestr(f"archive/{name}", content)
    return path


HOSTILE = {
    "a function of the machine": ("os", "system", False),
    "a function behind a module that torch imports": ("torch", "os.system", True),
    "a method of a class that is allowed": ("torch", "Tensor.__init__.__globals__.get", True),
    "torch.load, which opens another file": ("torch", "load", False),
    "a storage's own torch.load": ("torch.storage", "_load_from_bytes", False),
    "a function that no tensor needs": ("torch._utils", "_import_dotted_name", False),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_checkpoint_cannot_run_code(tmp_path: Path, case: str) -> None:
    """A name without a dot is replaced, and one with a dot is refused: in both cases nothing is called."""
    module, name, refused = HOSTILE[case]
    evil = call("os", "system", f"touch {tmp_path}/was-here")
    argument: str | bytes = f"touch {tmp_path}/was-here"
    if name in ("load", "_load_from_bytes"):
        inner = archive(tmp_path / "inner.pt", evil)
        argument = str(inner) if name == "load" else inner.read_bytes()
    path = archive(tmp_path / "mp_rank_00_model_states.pt", call(module, name, argument))
    if refused:
        with pytest.raises(JobError, match=r"cannot read .*mp_rank_00") as caught:
            open_shards(tmp_path)
        assert "dot" in caught.value.why
    else:
        assert isinstance(pickles.load(path), pickles.Placeholder)
    assert not (tmp_path / "was-here").exists()


def test_convert_and_generate_refuse_a_hostile_checkpoint(tmp_path: Path) -> None:
    archive(tmp_path / "mp_rank_00_model_states.pt", call("torch", "os.system", f"touch {tmp_path}/was-here"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 1}))
    with pytest.raises(JobError, match="cannot read"):
        conversion.convert(options(tmp_path, tmp_path / "model"), {})
    with pytest.raises(JobError, match="cannot read"):
        models.load(trained.find(str(tmp_path), {}), "float32")
    assert not (tmp_path / "was-here").exists()


def test_a_torchscript_program_is_not_loaded(tmp_path: Path) -> None:
    torch.jit.script(torch.nn.Linear(2, 2)).save(str(tmp_path / "program.pt"))
    with pytest.raises(JobError, match="cannot read") as caught:
        pickles.load(tmp_path / "program.pt")
    assert "TorchScript" in caught.value.why


def test_what_a_checkpoint_holds_beside_tensors_is_read_or_replaced(tmp_path: Path) -> None:
    dtypes = [value for value in vars(torch).values() if isinstance(value, torch.dtype)]
    held = {
        "dtypes": dtypes, "size": torch.Size([2, 3]), "set": {1}, "device": torch.device("cpu"),
        "parameter": torch.nn.Parameter(torch.arange(4.0)), "of half": torch.arange(4).half(),
        "options": Namespace(a=1), "counts": Counter("aab"),
    }  # fmt: skip
    torch.save(held, tmp_path / "held.pt")
    found = pickles.load(tmp_path / "held.pt")
    assert found["dtypes"] == dtypes
    assert (found["size"], found["set"], found["device"]) == (torch.Size([2, 3]), {1}, torch.device("cpu"))
    assert torch.equal(found["parameter"], held["parameter"]) and torch.equal(found["of half"], held["of half"])
    assert isinstance(found["options"], pickles.Placeholder) and isinstance(found["counts"], pickles.Placeholder)


class ByName:
    """A member of an enumeration, pickled as Python 3.11.0 to 3.11.3 do it: getattr(ENUMERATION, NAME)."""

    def __init__(self, member: object) -> None:
        self.member = member

    def __reduce__(self) -> tuple[object, ...]:
        return getattr, (type(self.member), self.member.name)


class ByValue(ByName):
    """As later versions of Python do it: ENUMERATION(VALUE)."""

    def __reduce__(self) -> tuple[object, ...]:
        return type(self.member), (self.member.value,)


@pytest.mark.parametrize("pickled", [ByName, ByValue])
@pytest.mark.parametrize("name", ["llama-1-bf16", "llama-2-fp32", "llama-3-bf16"])
def test_the_stage_is_read_whatever_python_has_written_it(
    written: Path, tmp_path: Path, name: str, pickled: type[ByName]
) -> None:
    folder = shutil.copytree(written / name / "global_step2", tmp_path / "global_step2")
    for path in folder.glob("*optim_states.pt"):
        state = torch.load(path, weights_only=False)
        from deepspeed.runtime.zero.config import ZeroStageEnum

        stage = ZeroStageEnum(state["optimizer_state_dict"]["zero_stage"])
        state["optimizer_state_dict"]["zero_stage"] = pickled(stage)
        torch.save(state, path)
        assert (b"getattr" in zipfile.ZipFile(path).read(f"{path.stem}/data.pkl")) == (pickled is ByName)
    weights = open_shards(folder).weights
    for weight_name, expected in torch.load(written / name / "truth.pth").items():
        assert torch.equal(weights[weight_name](), expected), weight_name


def test_a_member_of_an_enumeration_alone_may_be_asked_for_by_name(tmp_path: Path) -> None:
    class Globals:
        def __reduce__(self) -> tuple[object, ...]:
            return getattr, (dict, "update")

    torch.save(Globals(), tmp_path / "evil.pt")
    with pytest.raises(JobError, match="cannot read") as caught:
        pickles.load(tmp_path / "evil.pt")
    assert "attribute" in caught.value.why


def test_after_another_run_its_model_is_read_and_the_new_one_lies_in_this_runs_own_folder(tmp_path: Path) -> None:
    """So `launch convert --after TRAIN`, `launch generate --after CONVERT` need no path; that one is only read."""
    from training.converting import conversion, trained

    before, own = tmp_path / "sft-0001", tmp_path / "convert-0001"
    for run in (before, own):
        (run / "checkpoints/final").mkdir(parents=True)
        (run / "checkpoints/final/config.json").write_text("{}")
        (run / "checkpoints/final/model.safetensors").write_bytes(b"")
    environment = {"RUNNER_AFTER": str(before), "RUNNER_RUN": str(own)}
    found = trained.find(None, environment)
    assert found.weights == str(before / "checkpoints/final")
    assert conversion.output_folder(None, found, environment) == own / "checkpoints/final"
    assert conversion.output_folder(None, found, {"RUNNER_RUN": str(own)}) == before / "model"
    assert trained.find(None, {"RUNNER_RUN": str(own), "RUNNER_AFTER": ""}).weights == str(own / "checkpoints/final")
