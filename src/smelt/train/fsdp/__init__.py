"""Plan FSDP2 sharding from layer costs, link speed and memory; predict and measure the timeline of a step."""
