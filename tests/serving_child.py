"""The serving process of the transport tests, run as a script (see ``transport_pairs.py``).

Arguments: backend, region bytes, port. It prints one line, its address in hex (the ready-ack), and serves until its
standard input ends.
"""

import asyncio
import sys
import threading

import msgspec

from kvkin.transport.backends import open_transport


async def main(backend: str, num_bytes: int, port: int) -> None:
    from check_transport import make_content

    transport = open_transport(backend, port=port)
    region = transport.register(make_content(num_bytes))
    print(msgspec.msgpack.encode(transport.address(region)).hex(), flush=True)
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    # a daemon: it must not hold up the exit when the loop ends for another reason
    reader = threading.Thread(target=lambda: (sys.stdin.read(), loop.call_soon_threadsafe(ended.set)), daemon=True)
    reader.start()
    await ended.wait()
    await transport.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
