"""The error of a class's volume."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np


class VolumeError:
    """The difference of the volumes, as a fraction of the reference's."""

    scores: ClassVar = {
        "volume_error": "|prediction - reference| / reference, of the volumes; none without a "
        "reference"
    }

    def __call__(
        self, prediction: np.ndarray, reference: np.ndarray, spacing_mm: Sequence[float]
    ) -> Mapping[str, float]:
        """Return the error."""
        expected = np.count_nonzero(reference)
        difference = abs(np.count_nonzero(prediction) - expected)
        return {"volume_error": difference / expected if expected else np.nan}
