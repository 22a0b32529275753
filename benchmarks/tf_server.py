"""One process of the tf.data service: ``tf_server.py PORT DISPATCHER``, the dispatcher itself if the two are the same.

A program of its own, so that torch, which it does not need, is not in its memory.
"""

import sys

import tensorflow as tf

service = tf.data.experimental.service


def serve(port: int, dispatcher: int) -> None:
    if port == dispatcher:
        return service.DispatchServer(service.DispatcherConfig(port=port)).join()
    address = f"127.0.0.1:{port}"
    config = service.WorkerConfig(f"127.0.0.1:{dispatcher}", worker_address=address, port=port)
    service.WorkerServer(config).join()


if __name__ == "__main__":
    serve(*map(int, sys.argv[1:]))
