"""A shop: orders, and the invoices that an invoicing service writes for them."""
