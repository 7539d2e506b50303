"""The methods of a trainer by which a user writes checkpoints and continues from them."""

from __future__ import annotations

from pathlib import Path

from steepest.driver.steering import Steering
from steepest.validation import require_choice


class Checkpointing(Steering):
    """Part of `DistributedSGD` that has its checkpoints."""

    @property
    def best_checkpoint(self) -> Path | str | None:
        """The path or URL of the best evaluation's checkpoint, for `restore`; None if there is none.

        Returned when it is written, see `Checkpoints`.

        Raises:
            CheckpointError: it could not be written.
        """
        found = self._keeping.best()
        return found if found is None or isinstance(found, Path) else str(found)

    def save(self, path: str | Path) -> None:
        """Write a checkpoint: weights, optimizer state, buffers, and the position in the data.

        Args:
            path: a directory, or a URL such as ``s3://bucket/best``; a checkpoint in it is replaced
                when the new one is whole.

        Raises:
            CheckpointError: it cannot be written.
            ConfigurationError: a URL of a kind that is not known.
        """
        with self._idle("save"):
            self._keeping.save(path)

    def restore(self, path: str | Path, data: str = "continue") -> None:
        """Continue from a checkpoint, at any number of workers and servers, under any strategy.

        Training continues at exactly the sample after the last one. With the same global batch it
        takes the same steps, to rounding, at any number of workers.

        Data of as many samples whose fingerprint is another one are taken for the same data; a
        warning says in what they differ.

        Args:
            path: a directory, or a URL such as ``s3://bucket/best``.
            data: "continue" for the position that the checkpoint has in its data; "new" to go on
                with other data: they are begun with epoch 0, of which the samples that the
                checkpoint has not visited are no part. Weights, optimizer state, rows of tables,
                buffers, learning-rate schedules and the number of steps go on.

        Raises:
            CheckpointError: it is missing, damaged, or of another model or optimizer, or of another
                number of samples and `data` is not "new"; nothing has changed.
            ConfigurationError: a URL of a kind that is not known; `data` is something else.
        """
        require_choice("data", data, ("continue", "new"))
        with self._idle("restore"):
            self._keeping.restore(path, data)
