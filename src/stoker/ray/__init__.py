"""A site on Ray Serve: replicas that compute, a door in front of them."""
