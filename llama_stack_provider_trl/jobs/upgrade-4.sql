-- Schema version 4 to 5: credentials of nodes. schema.sql is applied next and makes their table.
BEGIN IMMEDIATE;
PRAGMA user_version = 5;
COMMIT;
