"""`stoker ray`: a site on a cluster of Ray."""
