"""A process that turns one piece after another into shards: python -m hqsweep.shards.worker DESCRIPTOR.

A process of multiprocessing would import the caller's main module again, which then needs a guard. This one gets pieces
over a socket, and ends when the other end is closed, so also after a kill of its parent.
"""

import signal
import sys
from multiprocessing.connection import Connection

from hqsweep.errors import UserError
from hqsweep.shards.encode import Encoder


def serve(line: Connection) -> None:
    """Answer a Setup, then each (number, piece) by (number, record), or by (number, exception) and the end."""
    number = -1
    try:
        encoder = Encoder(line.recv())
        while True:
            number, piece = line.recv()
            line.send((number, encoder.shard(number, piece)))
    except (EOFError, ConnectionError):  # the parent is gone
        return
    except UserError as error:
        line.send((number, UserError(str(error))))
    except OSError as error:
        line.send((number, error))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it, and closes the socket
    serve(Connection(int(sys.argv[1])))
