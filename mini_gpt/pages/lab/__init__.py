"""The lab: attention of one short sentence, with all numbers shown and editable. Imports come from earlier packages."""
