"""Communication between ranks: compressed gradients, topology-aware collectives, local steps."""
