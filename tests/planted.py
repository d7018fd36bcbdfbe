"""Plants and watches what the environment orders when it is imported: for servers of workers, which are told no more than what to import."""

from tests.plant import plant_what_is_ordered
from tests.recorded import record_if_asked

plant_what_is_ordered()
record_if_asked()
