-- Schema version 11 to 12: searches. schema.sql is applied next and makes the table of their trials.
BEGIN IMMEDIATE;
PRAGMA user_version = 12;
COMMIT;
