"""``python -m rpc_reading_service`` is ``rpc-reading-worker``."""

from rpc_reading_service.cli import main

if __name__ == "__main__":
    main(prog_name="rpc-reading-worker")
