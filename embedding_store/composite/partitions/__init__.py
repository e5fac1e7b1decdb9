"""Tables split over several stores, by id or by column."""
