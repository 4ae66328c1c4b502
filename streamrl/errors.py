"""The errors of StreamRL.

ValueError                    what the user got wrong (settings, files, arguments): exit code 2
StreamRLError                 what the system met: exit code 1
├── UnavailableError          a broker or peer does not answer; trying again may help
│   └── BrokerUnavailableError
├── RefusedError              a peer understood and said no; trying again does not help
│   ├── StaleAttemptError     from a process of an earlier life of the run
│   ├── UnauthenticatedError  the caller does not show who it is
│   └── ForbiddenError        the caller's role may not do this
├── EngineDiedError           an inference engine ended
├── WeightTransferError       a weight version could not be fetched whole, or its digests disagree
├── FabricError               GPUs of one fabric did not meet, or a broadcast between them broke off
├── PublishError              a weight version could not be published
├── CheckpointError           a checkpoint is damaged, or was written by other ranks than read it
├── RecordError               a Kafka record cannot be handled: it goes to dead-letters
├── StorageError              a disk is full or cannot be written
├── NoProgressError           nothing moved for longer than allowed
├── UnusableBatchError        not one sample of a batch could be generated or scored
└── ServiceDiedError          a service ended and is not coming back
"""


class StreamRLError(Exception):
    """Something the system met while it ran."""


class UnavailableError(StreamRLError):
    """A broker or peer does not answer; trying again may help."""


class BrokerUnavailableError(UnavailableError):
    """The Kafka cluster does not answer."""


class RefusedError(StreamRLError):
    """A peer understood and said no; trying again does not help."""


class StaleAttemptError(RefusedError):
    """Sent by a process of an earlier life of the run."""

    def __init__(self, message: str, current_attempt: int = 0) -> None:
        """
        Args:
            current_attempt: the highest attempt of the run that is known; 0: none.
        """
        super().__init__(message)
        self.current_attempt = current_attempt


class UnauthenticatedError(RefusedError):
    """The caller does not show who it is."""


class ForbiddenError(RefusedError):
    """The caller's role may not do this."""


class EngineDiedError(StreamRLError):
    """An inference engine ended."""


class WeightTransferError(StreamRLError):
    """A weight version could not be fetched whole, or its digests disagree."""


class FabricError(StreamRLError):
    """GPUs of one fabric did not meet, or a broadcast between them broke off."""


class PublishError(StreamRLError):
    """A weight version could not be published."""


class CheckpointError(StreamRLError):
    """A checkpoint is damaged, or was written by other ranks than read it."""


class RecordError(StreamRLError):
    """A Kafka record cannot be handled."""


class StorageError(StreamRLError):
    """A disk is full or cannot be written."""


class NoProgressError(StreamRLError):
    """Nothing moved for longer than allowed."""


class UnusableBatchError(StreamRLError):
    """Not one sample of a batch could be generated or scored."""


class ServiceDiedError(StreamRLError):
    """A service ended and is not coming back."""
