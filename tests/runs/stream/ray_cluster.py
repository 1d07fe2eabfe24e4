"""A Ray cluster on this machine with two CPUs: prints its address and ends with its input.

Run as a program: Ray crashes in a fork of a process that has used gRPC, as other tests have.
"""

import sys

from ray.cluster_utils import Cluster

if __name__ == "__main__":
    node = {"num_cpus": 2, "include_dashboard": False, "object_store_memory": 2**27}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    print(f"address {cluster.address}", flush=True)
    sys.stdin.read()
    cluster.shutdown()
