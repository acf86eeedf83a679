"""A model that sees tokens that come later is refused, and one that does not is left as it was."""

import pytest
import torch
import transformers
from support.models.tiny import tiny
from torch import nn

from hqsweep.errors import UserError
from hqsweep.models.causal import check_causal

VOCAB = 96


class Attention(nn.Module):
    """Logits of an attention, causal or not; it drops in evaluation, too."""

    def __init__(self, causal: bool, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.causal = causal
        self.table, self.out = nn.Embedding(VOCAB, 32), nn.Linear(32, VOCAB)
        self.to(dtype)

    def forward(self, tokens):
        x = nn.functional.dropout(self.table(tokens), 0.1)[:, None]
        return self.out(nn.functional.scaled_dot_product_attention(x, x, x, is_causal=self.causal)[:, 0])


class WithLoss(Attention):
    def loss(self, tokens, targets):
        return self(tokens).square().mean()


class Failing(Attention):
    def forward(self, tokens):
        raise RuntimeError("it takes a GPU")


def bert(**options):
    return transformers.BertLMHeadModel(
        transformers.BertConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=64,
            **options,
        )
    )


@pytest.mark.parametrize(
    "model",
    [
        lambda: Attention(causal=False),
        lambda: Attention(causal=False, dtype=torch.bfloat16),
        lambda: bert().eval(),
    ],
)
def test_a_model_that_sees_later_tokens_is_refused(model):
    model = model()
    with pytest.raises(
        UserError, match=r"model: (Attention|BertLMHeadModel) sees tokens that come later: .*is_decoder"
    ):
        check_causal(model, VOCAB)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral", "gpt_oss"])
def test_models_of_hugging_face_are_causal(kind):
    check_causal(tiny(kind), VOCAB)


@pytest.mark.parametrize(
    "model",
    [
        lambda: Attention(causal=True),
        lambda: Attention(causal=True, dtype=torch.bfloat16),
        lambda: WithLoss(causal=False),
        lambda: Failing(causal=False),
        lambda: bert(is_decoder=True),
    ],
)
def test_what_is_causal_or_cannot_be_told_passes_and_nothing_changes(model):
    model, drawn = model(), torch.get_rng_state()
    check_causal(model, VOCAB)
    assert model.training and torch.equal(torch.get_rng_state(), drawn)
