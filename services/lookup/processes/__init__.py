"""The processes of the service: supervisor, workers, web; how they start, live and end."""
