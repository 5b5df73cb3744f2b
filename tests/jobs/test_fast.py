"""Less work, the same loss and the same gradients: each saving beside transformers' own way, on tiny models."""

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.training

from tests.jobs import conftest  # noqa: E402, F401
from training.fast import documents, head_loss  # noqa: E402

VOCABULARY, PAD = 97, 0
LENGTHS = (9, 4, 17, 1, 6)


def tiny(kind: str, **more: object):
    """A model of two layers with random weights and no dropout."""
    from transformers import AutoConfig, AutoModelForCausalLM

    size = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}
    if kind == "gpt2":
        size = {"n_layer": 2, "n_embd": 32, "n_head": 4, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    if kind in ("llama", "mistral", "qwen2", "qwen3", "phi3", "olmo2", "smollm3", "starcoder2"):
        size["num_key_value_heads"] = 2
    ends = {"pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(3)
    config = AutoConfig.for_model(kind, vocab_size=VOCABULARY, max_position_embeddings=64, **size, **ends, **more)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    return model.train()


def examples(masked: bool = False) -> list[dict[str, list[int]]]:
    """Documents of several lengths; `masked` takes no loss from their first halves."""
    torch.manual_seed(5)
    found = []
    for length in LENGTHS:
        ids = torch.randint(3, VOCABULARY, (length,)).tolist()
        skip = length // 2 if masked else 0
        found.append({"input_ids": ids, "labels": [-100] * skip + ids[skip:]})
    return found


def padded(rows: list[dict[str, list[int]]]) -> dict[str, "torch.Tensor"]:
    """What TRL's collator makes of rows."""
    width = max(len(row["input_ids"]) for row in rows)

    def fill(name: str, value: int) -> "torch.Tensor":
        return torch.tensor([row[name] + [value] * (width - len(row[name])) for row in rows])

    return {
        "input_ids": fill("input_ids", PAD),
        "labels": fill("labels", -100),
        "attention_mask": torch.tensor([[1] * len(r["input_ids"]) + [0] * (width - len(r["input_ids"])) for r in rows]),
    }


def one_row(rows: list[dict[str, list[int]]]) -> dict[str, "torch.Tensor"]:
    """What TRL's padding-free collator makes of rows."""
    positions = torch.cat([torch.arange(len(row["input_ids"])) for row in rows])[None]
    labels = torch.tensor([[label for row in rows for label in row["labels"]]])
    labels[positions == 0] = -100
    ids = torch.tensor([[token for row in rows for token in row["input_ids"]]])
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


def stock(model, batch: dict[str, "torch.Tensor"], items: "torch.Tensor | None" = None):
    model.zero_grad()
    loss = model(**batch, use_cache=False, **({} if items is None else {"num_items_in_batch": items})).loss
    loss.backward()
    return loss.detach(), {name: weight.grad.clone() for name, weight in model.named_parameters()}


def ours(model, batch: dict[str, object], items: "torch.Tensor | None" = None):
    head_loss.install(model)
    documents.install()
    return stock(model, {name: value for name, value in batch.items() if name != documents.TOKENS}, items)


def assert_same(one, other) -> None:
    assert torch.allclose(one[0], other[0], atol=1e-6), (one[0], other[0])
    for name, grad in one[1].items():
        assert torch.allclose(grad, other[1][name], atol=2e-6, rtol=1e-4), name


@pytest.mark.parametrize("kind", sorted(head_loss.PLAIN_HEADS))
@pytest.mark.parametrize("masked", [False, True], ids=["all tokens", "answers only"])
def test_a_padded_batch_laid_flat_gives_the_stock_loss_and_gradients(kind: str, masked: bool) -> None:
    """Of each kind of model that is said to have a plain head."""
    model = tiny(kind)
    assert head_loss.why_not(model) == ""
    batch = documents.WithoutPadding(padded, flat=True, masked=True)(examples(masked))
    assert batch["input_ids"].shape == (1, sum(LENGTHS))
    assert batch[documents.TOKENS] == sum(LENGTHS)
    items = torch.tensor(len(batch["loss_targets"]))
    reference = stock(model, padded(examples(masked)), items)
    assert_same(reference, ours(model, batch, items))


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_documents_packed_into_one_row_do_not_see_each_other(kind: str) -> None:
    """The row is what its documents are apart. With torch before 2.6 transformers' own way is not: they do there."""
    apart = stock(tiny(kind), padded(examples()))
    batch = documents.WithoutPadding(one_row, flat=True, masked=True)(examples())
    assert_same(apart, ours(tiny(kind), batch))
    reference = stock(tiny(kind), one_row(examples()))
    isolated = torch.__version__ >= "2.6"
    assert torch.allclose(reference[0], apart[0], atol=1e-6) is isolated


def test_a_sliding_window_stays_one() -> None:
    """A document longer than the window: its mask is the stock one's."""
    model = tiny("mistral", sliding_window=5)
    reference = stock(model, padded(examples()))
    batch = documents.WithoutPadding(padded, flat=True, masked=True)(examples())
    assert_same(reference, ours(model, batch))
    wide = stock(tiny("mistral", sliding_window=None), padded(examples()))
    assert not torch.allclose(reference[0], wide[0], atol=1e-6), "the window matters here"


def test_full_rows_stay_rows_and_lose_only_their_mask() -> None:
    model = tiny("llama")
    rows = [row for row in examples() if len(row["input_ids"]) == 9] * 3
    batch = documents.WithoutPadding(padded, flat=True, masked=True)(rows)
    assert batch["input_ids"].shape == (3, 9)
    assert "attention_mask" not in batch
    reference = stock(model, padded(rows))
    assert_same(reference, ours(model, batch))


@pytest.mark.parametrize("piece_rows", [16, 33, 4096], ids=["16 rows", "33 rows", "all rows"])
@pytest.mark.parametrize("bias", [False, True])
def test_the_size_of_a_piece_changes_nothing(monkeypatch: pytest.MonkeyPatch, piece_rows: int, bias: bool) -> None:
    monkeypatch.setattr(head_loss, "PIECE_ROWS_ON_CPU", piece_rows)
    torch.manual_seed(1)
    head = torch.nn.Linear(8, VOCABULARY, bias=bias)
    hidden, targets = torch.randn(100, 8, requires_grad=True), torch.randint(0, VOCABULARY, (100,))
    wanted = torch.nn.functional.cross_entropy(head(hidden), targets, reduction="sum") / 7
    leaves = (hidden, *head.parameters())
    expected = torch.autograd.grad(wanted * 3, leaves)
    found = head_loss._LossWithGradient.apply(hidden, head.weight, head.bias, targets, 1 / 7, None)
    assert torch.allclose(found, wanted)
    for grad, reference in zip(torch.autograd.grad(found * 3, leaves), expected, strict=True):
        assert torch.allclose(grad, reference, atol=1e-5)


def test_no_row_with_a_label_is_a_loss_of_nothing_with_gradients_of_zero() -> None:
    """A micro batch of questions only must neither fail nor leave a process of DDP without its gradients."""
    model = tiny("llama")
    rows = [{**row, "labels": [-100] * len(row["labels"])} for row in examples()]
    loss, grads = ours(model, documents.WithoutPadding(padded, flat=True, masked=True)(rows), torch.tensor(5))
    assert loss == 0
    assert all((grad == 0).all() for grad in grads.values())


def test_in_bf16_the_loss_is_the_stock_one_up_to_bf16() -> None:
    """Under autocast, as transformers' trainer runs it; sums are kept in float32, as the stock loss keeps them."""
    model = tiny("llama")
    batch = documents.WithoutPadding(padded, flat=True, masked=True)(examples())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        reference = stock(model, padded(examples()))
        found = ours(model, batch)
    assert found[0].dtype == torch.float32
    assert torch.allclose(reference[0], found[0], atol=2e-2)
    for name, grad in reference[1].items():
        assert torch.nn.functional.cosine_similarity(grad.flatten(), found[1][name].flatten(), dim=0) > 0.99, name


def test_entropy_and_accuracy_are_those_of_the_logits() -> None:
    torch.manual_seed(2)
    head = torch.nn.Linear(8, VOCABULARY, bias=False)
    hidden, targets = torch.randn(50, 8), torch.randint(0, VOCABULARY, (50,))
    watch = head_loss.Watch()
    head_loss._LossWithGradient.apply(hidden, head.weight, None, targets, 1.0, watch)
    logits = head(hidden)
    entropy = torch.distributions.Categorical(logits=logits).entropy().mean()
    assert watch.entropy == pytest.approx(entropy.item(), rel=1e-5)
    assert watch.accuracy == pytest.approx((logits.argmax(-1) == targets).float().mean().item())


def test_generation_is_what_it_was() -> None:
    """The head and the attention are used without a loss too."""
    model = tiny("llama").eval()
    prompt = torch.tensor([[5, 6, 7]])
    before = model.generate(prompt, max_new_tokens=5, do_sample=False)
    head_loss.install(model)
    documents.install()
    assert torch.equal(model.generate(prompt, max_new_tokens=5, do_sample=False), before)


def test_a_model_whose_logits_are_more_than_its_head_is_left_alone() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    size = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
    config = AutoConfig.for_model("gemma2", vocab_size=31, num_key_value_heads=2, head_dim=8, **size)
    assert "gemma2" in head_loss.why_not(AutoModelForCausalLM.from_config(config))
    scaled = tiny("llama")
    scaled.config.logit_scale = 0.5
    assert "scaled" in head_loss.why_not(scaled)
