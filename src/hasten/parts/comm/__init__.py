"""Between ranks: gradients in fewer bytes, collectives that know the topology, local steps."""
