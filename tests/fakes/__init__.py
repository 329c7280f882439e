"""What tests put in the place of models, networks, services and stores; written once."""
