"""Stock transformers runs the exported hero family: logits, experts, tokens, caches, padding, tokenizer.

Needs torch and transformers, which the lane of the same name installs; skipped everywhere else.
"""

from __future__ import annotations

import numpy as np
import pytest

from noonsight.serve import hf, parity, reference
from noonsight.tokens import tokenizer
from tests.serve.fixtures import VOCABULARY, random_model, tiny_config, tiny_tokenizer
from tests.serve.test_reference import tiny_snowball

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.lane("transformers")

BOUND = 1e-5  # against the float64 reference; two float32 runs may differ by twice that


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    config = tiny_config()
    params, extra = random_model(config)
    folder = tmp_path_factory.mktemp("made")
    hf.export_model(params, extra, config, tiny_tokenizer(folder / "tokenizer"), folder / "export")
    return folder / "export", params, extra, config


@pytest.fixture(scope="module", params=["sdpa", "eager"])
def model(made, request):
    options = {"trust_remote_code": True, "attn_implementation": request.param}
    return transformers.AutoModelForCausalLM.from_pretrained(made[0], **options).eval()


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(4).integers(0, VOCABULARY, (2, 64))


def logprobs(model, tokens, **options):
    with torch.no_grad():
        return reference.log_softmax(model(input_ids=torch.as_tensor(tokens), **options).logits.double().numpy())


@pytest.mark.parametrize(
    "config, bias_scale", [(tiny_config(), 30.0), (tiny_snowball(), 0.3)], ids=["bias 30", "snowball"]
)
def test_receipt_passes(tmp_path, config, bias_scale):
    params, extra = random_model(config, bias_scale=bias_scale)
    hf.export_model(params, extra, config, tiny_tokenizer(tmp_path / "tokenizer"), tmp_path / "export")
    receipt = parity.check_export(tmp_path / "export", params, extra, config, engine="hf", seed=0)
    assert receipt.passed, receipt.checks
    assert max(check.value for check in receipt.checks if "largest" in check.name) < BOUND


def test_logits_and_hidden_states_match_the_reference(made, model, tokens):
    truth = reference.trace(*made[1:], tokens)
    with torch.no_grad():
        output = model(input_ids=torch.as_tensor(tokens), output_hidden_states=True)
    for layer, state in enumerate(output.hidden_states[:-1]):
        assert np.abs(state.double().numpy() - truth.hidden[layer]).max() < BOUND * max(
            1, np.abs(truth.hidden[layer]).max()
        )
    assert np.abs(logprobs(model, tokens) - reference.log_softmax(truth.logits)).max() < BOUND


def test_one_token_at_a_time_equals_all_at_once(model, tokens):
    """Forty tokens at once and the rest one by one, across the window's edge, through keys, values and convolutions."""
    whole, parts, cache = logprobs(model, tokens), [], None
    for start, end in [(0, 1), (1, 40), *((i, i + 1) for i in range(40, 64))]:
        with torch.no_grad():
            given = torch.as_tensor(tokens[:, start:end])
            output = model(input_ids=given, past_key_values=cache, use_cache=True)
        cache = output["cache"] if "cache" in output else output["past_key_values"]
        parts.append(reference.log_softmax(output.logits.double().numpy()))
    assert np.abs(np.concatenate(parts, axis=1) - whole).max() < 2 * BOUND


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_score_as_they_do_alone(model, tokens, side):
    pad = np.zeros((2, 9), tokens.dtype)
    there = np.ones((2, 50), tokens.dtype)
    order = (lambda a, b: [a, b]) if side == "left" else (lambda a, b: [b, a])
    rows, mask = (np.concatenate(order(a, b), axis=1) for a, b in ((pad, tokens[:, :50]), (pad, there)))
    found = logprobs(model, rows, attention_mask=torch.as_tensor(mask))
    found = found[:, 9:] if side == "left" else found[:, :50]
    assert np.abs(found - logprobs(model, tokens)[:, :50]).max() < 2 * BOUND


def test_generation_is_the_same_with_cache_without_and_in_a_padded_batch(model, tokens):
    options = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": None}
    prompt = torch.as_tensor(tokens[:, :12])
    plain = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    slow = model.generate(prompt, attention_mask=torch.ones_like(prompt), use_cache=False, **options)
    pad = torch.zeros(2, 5, dtype=prompt.dtype)
    mask = torch.cat([pad, torch.ones_like(prompt)], dim=1)
    padded = model.generate(torch.cat([pad, prompt], dim=1), attention_mask=mask, **options)
    assert torch.equal(plain, slow) and torch.equal(plain, padded[:, 5:])
    beams = [
        model.generate(prompt, attention_mask=torch.ones_like(prompt), num_beams=3, use_cache=cached, **options)
        for cached in (True, False)
    ]
    assert torch.equal(*beams)


def test_a_cache_without_convolutions_is_refused(model, tokens):
    with pytest.raises(ValueError, match="no room for the short convolutions"):
        model(input_ids=torch.as_tensor(tokens), past_key_values=transformers.DynamicCache())


def test_bfloat16_folder_loads_and_its_router_stays_precise(made, tokens, tmp_path):
    _, params, extra, config = made
    tokenizer_path = tiny_tokenizer(tmp_path / "tokenizer")
    hf.export_model(params, extra, config, tokenizer_path, tmp_path / "export", dtype="bfloat16")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "export", trust_remote_code=True, dtype="auto")
    layer = model.model.layers[0]
    assert model.lm_head.weight.dtype == torch.bfloat16 and layer.input_layernorm.weight.dtype == torch.float32
    stored = hf.import_model(tmp_path / "export")[0].layers.router_bias[0]
    assert np.array_equal(layer.mlp.router.bias.detach().numpy(), stored)
    truth = reference.log_softmax(reference.forward(params, extra, config, tokens))
    assert np.abs(logprobs(model.eval(), tokens) - truth).mean() < 0.2


def test_saved_again_by_transformers_it_is_the_same_model(model, tokens, tmp_path):
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True).eval()
    assert np.abs(logprobs(again, tokens) - logprobs(model, tokens)).max() < 2 * BOUND


def test_stock_tokenizer_gives_our_ids(made):
    theirs = transformers.AutoTokenizer.from_pretrained(made[0], trust_remote_code=True)
    ours = tokenizer.load(made[0])
    for text in (
        "the sea and the ship",
        "héllo wörld €",
        f"a control token in text: {tokenizer.END}",
        "  two  spaces\n",
    ):
        assert theirs(text).input_ids == ours.encode(text)
        assert theirs.decode(ours.encode(text)) == text
    assert theirs.eos_token_id == ours.eos


def test_configuration_has_no_defaults(made):
    config = transformers.AutoConfig.from_pretrained(made[0], trust_remote_code=True)
    assert config.rope_theta == config.rope_parameters["rope_theta"] == made[3].rope_theta
    fields = config.to_dict()
    fields.pop("qk_mult")
    with pytest.raises(ValueError, match="lacks qk_mult"):
        type(config)(**fields)
