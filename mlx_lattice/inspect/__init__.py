"""Which route ran, why and at what cost: explain, trace, verify, cost, pages."""
