"""Mesh and logical-axis rules, expert dispatch and combine, context parallel, EPLB: they come with the sharded mesh."""
