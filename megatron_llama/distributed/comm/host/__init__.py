"""Transport between hosts: what only gloo needs. A GPU run imports none of it."""
