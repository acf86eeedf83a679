"""A model as a user may have one: a Llama of 29 million parameters, trained a little by transformers and torch alone.

    python examples/own_model/make_trunk.py OUT          # 29 million parameters; for a GPU, or an hour of patience
    python examples/own_model/make_trunk.py OUT --tiny   # 0.1 million parameters; half a minute on two cores

Its data are the sources of Python's standard library. Half of the files train the tokenizer and the model, the other
half is left for the study of recipes, which so sees text that the model has not seen. OUT gets

    tokenizer.json   a byte-level BPE tokenizer, with <|endoftext|>
    study.jsonl      the other half of the files, one {"name": ..., "text": ...} a line
    model/           config.json and model.safetensors, without an optimizer's state, as models are published
"""

import argparse
import json
import math
import sysconfig
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

SEPARATOR = "<|endoftext|>"
SIZES = {
    "full": {"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8,
             "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 512},
    "tiny": {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2,
             "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128},
}  # fmt: skip
TRAINING = {
    "full": {"steps": 1500, "batch": 16, "context": 256, "lr": 1e-3},
    "tiny": {"steps": 300, "batch": 8, "context": 64, "lr": 3e-3},
}
WARMUP, DECAY = 0.05, 0.3
"""Parts of the steps over which the learning rate rises, and falls to a tenth."""


def documents(limit: int | None) -> list[tuple[str, str]]:
    """(name, text) of the standard library's sources, in order of names; at most `limit` files."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = (path for path in sorted(root.rglob("*.py")) if "site-packages" not in path.parts)
    found = [(path.relative_to(root).as_posix(), path.read_text("utf-8", errors="replace")) for path in paths]
    return [(name, text) for name, text in found if text.strip()][:limit]


def trained_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE, which can write any text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[SEPARATOR], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def rate(step: int, steps: int, lr: float) -> float:
    """The learning rate of a step, from 0: up, constant, and down to a tenth of it."""
    fall = min(1.0, (steps - step) / (DECAY * steps))
    return lr * min(1.0, (step + 1) / max(1, WARMUP * steps)) * (0.1 + 0.9 * fall)


def train(model: LlamaForCausalLM, tokens: torch.Tensor, steps: int, batch: int, context: int, lr: float) -> float:
    """Train on random windows; the mean loss of the last tenth of the steps, in nats."""
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1)
    drawn, losses = torch.Generator().manual_seed(0), []
    for step in range(steps):
        starts = torch.randint(len(tokens) - context, (batch,), generator=drawn)
        window = torch.stack([tokens[start : start + context] for start in starts]).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = model(input_ids=window, labels=window, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate(step, steps, lr)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if (step + 1) % max(1, steps // 10) == 0:
            print(f"step {step + 1} of {steps}: loss {loss.item():.3f}", flush=True)
    return torch.stack(losses[-max(1, steps // 10) :]).mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a tokenizer, a text and a model that is trained a little.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--tiny", action="store_true", help="0.1 million parameters instead of 29")
    parser.add_argument("--steps", type=int, help="steps of training")
    given = parser.parse_args()
    size = "tiny" if given.tiny else "full"
    training = TRAINING[size] | ({"steps": given.steps} if given.steps else {})
    given.out.mkdir(parents=True, exist_ok=True)

    files = documents(200 if given.tiny else None)
    seen, left = files[::2], files[1::2]
    tokenizer = trained_tokenizer([text for _, text in seen], SIZES[size]["vocab_size"])
    tokenizer.save(str(given.out / "tokenizer.json"))
    with (given.out / "study.jsonl").open("w") as file:
        file.writelines(json.dumps({"name": name, "text": text}) + "\n" for name, text in left)
    encoded = tokenizer.encode_batch_fast([text + SEPARATOR for _, text in seen])
    tokens = torch.tensor([token for each in encoded for token in each.ids])

    torch.manual_seed(0)
    config = LlamaConfig(**SIZES[size], tie_word_embeddings=True, eos_token_id=tokenizer.token_to_id(SEPARATOR))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = LlamaForCausalLM(config).to(device).train()
    print(f"{model.num_parameters() / 1e6:.1f} million parameters, {len(tokens) / 1e6:.2f} million tokens, on {device}")
    loss = train(model, tokens, **training)
    model.save_pretrained(given.out / "model")
    print(f"loss {loss:.3f} nats (ln of the vocabulary is {math.log(config.vocab_size):.3f}); wrote {given.out}/model")


if __name__ == "__main__":
    main()
