"""The output projection of a language model, which recipes leave in high precision unless they name it."""

from torch import nn


def output_projection(model: nn.Module) -> nn.Module | None:
    """The linear that makes logits of the vocabulary: the one that the model names (get_output_embeddings, as Hugging
    Face has it), or the last linear, if it has a row for each entry of an nn.Embedding; else None."""
    said = getattr(model, "get_output_embeddings", None)
    if callable(said):
        try:
            projection = said()
        except (AttributeError, NotImplementedError):
            projection = None
        if isinstance(projection, nn.Linear):
            return projection
    modules = list(model.modules())
    linears = [module for module in modules if isinstance(module, nn.Linear)]
    vocabularies = {module.num_embeddings for module in modules if isinstance(module, nn.Embedding)}
    return linears[-1] if linears and linears[-1].out_features in vocabularies else None
