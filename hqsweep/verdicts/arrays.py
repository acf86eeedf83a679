"""The arrays that a verdict takes."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike


def equal_shapes(values: Mapping[str, ArrayLike], dimensions: int) -> dict[str, np.ndarray]:
    """The arrays as float64. Raises ValueError where they are empty, not finite, or differ in shape."""
    arrays = {name: np.asarray(array_like, dtype=np.float64) for name, array_like in values.items()}
    shapes = {name: array.shape for name, array in arrays.items()}
    if len(set(shapes.values())) > 1:
        raise ValueError(f"arms have other replicates than each other: shapes {shapes}")
    for name, array in arrays.items():
        if array.ndim != dimensions or not array.size or not np.isfinite(array).all():
            raise ValueError(f"'{name}': an array of {dimensions} dimension(s) of finite values is needed, not {array}")
    return arrays
