"""The command `streamrl`: the top layer, which starts and watches the services."""
