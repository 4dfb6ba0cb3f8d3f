"""Names of columns that look as if they identify a person, or like free text."""

from __future__ import annotations

import re

# With a number alone, as in `PATIENT_NUM` and `Kunden-Nr`, and with "id" in one word.
_PERSONS = frozenset(
    "patient person subject subj customer client member encounter provider user account case pat"
    " patienten fall kunde kunden konto versicherten".split()
)
_NUMBERS = frozenset("number no nr num key index".split())
_ALONE = ({"index"}, {"index", "level"}, {"patient"}, {"customer"}, {"client"}, {"kunde"})
_IDENTIFIERS = frozenset(
    "id ids uid uuid guid ssn mrn nhs name firstname lastname surname forename fullname username"
    " email passport iban identifier pid vorname nachname nom prenom cognome apellido apellidos"
    " eid npi seqn usubjid respid visitid sampleid recordid patientunitstayid unnamed rownames"
    " ipp nir bsn cpf dni nino pesel kvnr aadhaar patientennummer fallnummer kundennummer".split()
).union(f"{person}id" for person in _PERSONS)
# These name a person alone or with the other words, as in `home_phone` and `street address`. A
# `phone_service` does not.
_CONTACTS = frozenset(
    "mail phone telephone mobile fax address street account license licence".split()
)
_BESIDE_CONTACTS = frozenset(
    "e number numbers no nr num home work private patient customer client person contact".split()
)
_FREE_TEXT = frozenset(
    "note notes comment comments remark remarks text description summary message".split()
)


def words_of_name(name: str) -> set[str]:
    """Return the words of a column's name in lower case: `PatientID` has patient and id."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name)
    words = re.findall(r"[a-z]+", spaced.lower())
    return set(words)


def is_identifier(name: str) -> bool:
    """Return whether a column is named like something that identifies a person."""
    words = words_of_name(name)
    is_contact = bool(words & _CONTACTS) and words <= _CONTACTS | _BESIDE_CONTACTS
    is_number = words <= _PERSONS | _NUMBERS and bool(words & _PERSONS) and bool(words & _NUMBERS)
    # Concepts of OMOP are codes.
    is_named = bool(words & _IDENTIFIERS) and "concept" not in words
    return is_contact or is_number or is_named or words in _ALONE


def is_free_text(name: str) -> bool:
    """Return whether a column is named like free text."""
    return bool(words_of_name(name) & _FREE_TEXT)
