"""`python -m generator_svc`."""

import logging
import os

if __name__ == "__main__":
    # Imported here only: every process of an engine imports this module again.
    from generator_svc.main import main

    exit_code = main()
    logging.shutdown()
    # All is done. Taking an interpreter down that has vLLM in it takes seconds, for which a run's end would wait.
    os._exit(exit_code)
