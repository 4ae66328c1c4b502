"""What weights_svc reads of the settings file: the run, the address, and section `weights`, which others read too."""

from streamrl.settings import ServiceSettings


class WeightsServiceSettings(ServiceSettings):
    """weights_svc has no section that it alone reads."""
