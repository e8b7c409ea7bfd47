"""``python -m tessella_p2p``: the same as the ``tessella-p2p`` command."""

from tessella_p2p.cli.main import main

if __name__ == "__main__":
    main()
