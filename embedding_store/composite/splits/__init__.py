"""How one table is split over several stores. Pure planning: no store is called here."""
