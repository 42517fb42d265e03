"""JSON schemas, brought into a form that the grammar compiler holds to."""
