"""What can be checked of the settings before anything starts, in a moment: no large library, no network, no broker."""

from streamrl.kafka.client_check import check_client
from trainer_svc.data import check_data
from trainer_svc.models import check_model
from trainer_svc.rewards import check_rewards
from trainer_svc.settings import TrainerSettings
from trainer_svc.tracking_place import check_tracking


def check(settings: TrainerSettings) -> None:
    """Looks at the model's folder, data files and their fields, reward functions, what librdkafka is told, and where
    runs are logged.

    Raises:
        ValueError: something is not there or has another form; says what to do.
    """
    check_model(settings.model.path)
    check_data(settings.data)
    check_rewards(settings.reward.functions)
    check_client(settings.kafka)
    check_tracking(settings)
