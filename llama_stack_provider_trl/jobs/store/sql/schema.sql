-- The job database. Times are seconds since the epoch. Applied as one transaction; repeating it does nothing.
BEGIN IMMEDIATE;

-- One row per job; what belongs to a try at it is in attempts.
CREATE TABLE IF NOT EXISTS jobs (
    age INTEGER PRIMARY KEY AUTOINCREMENT,  -- order of arrival: the lower, the older
    job_uuid TEXT NOT NULL UNIQUE,
    request_digest TEXT NOT NULL,           -- distinguishes a repeated POST from a different one
    spec TEXT NOT NULL,                     -- JobSpec as JSON, frozen at POST
    state TEXT NOT NULL,
    attempt INTEGER NOT NULL DEFAULT 0,     -- the current one; events of any other are refused
    retries_used INTEGER NOT NULL DEFAULT 0,
    not_before REAL NOT NULL DEFAULT 0,     -- waits for its next try until then
    device TEXT,                            -- of the current attempt
    scheduled_at REAL NOT NULL,
    started_at REAL,                        -- of the first attempt that did
    completed_at REAL,
    detail TEXT NOT NULL DEFAULT '',
    reason TEXT,
    message TEXT NOT NULL DEFAULT '',
    wanted_device TEXT NOT NULL DEFAULT 'auto', -- this and the rest stand in spec too; each pass and each POST asks for
    priority INTEGER NOT NULL DEFAULT 0,        -- them, and to take them out of a thousand specs costs 10 ms
    ranks INTEGER NOT NULL DEFAULT 1,
    checkpoint_dir TEXT NOT NULL DEFAULT '',
    demand TEXT NOT NULL DEFAULT '',            -- placement.Demand as JSON; '': the service's own node alone
    created_by TEXT NOT NULL DEFAULT '',        -- name of the token that submitted it; '': not known (inline provider)
    tokens INTEGER NOT NULL DEFAULT 0,          -- tokens_seen at its furthest step: what totals has of it
    blocked INTEGER NOT NULL DEFAULT 0          -- 1: a job that it comes after has not completed yet; never 1 again
) STRICT;

CREATE INDEX IF NOT EXISTS jobs_by_state ON jobs (state, age);
CREATE INDEX IF NOT EXISTS jobs_by_end ON jobs (completed_at, job_uuid) WHERE state = 'completed';
CREATE INDEX IF NOT EXISTS jobs_by_age ON jobs (age, job_uuid);
CREATE INDEX IF NOT EXISTS jobs_by_model ON jobs (CASE WHEN json_valid(spec) THEN json_extract(spec, '$.source.model') END, completed_at)
    WHERE state = 'completed';
CREATE INDEX IF NOT EXISTS jobs_by_checkpoint_dir ON jobs (checkpoint_dir);
CREATE INDEX IF NOT EXISTS jobs_blocked ON jobs (state, age) WHERE blocked = 1;

-- What a caller of the service requested, so that it can be requested again with changes. Trials have none of their own.
CREATE TABLE IF NOT EXISTS kept_requests (
    job_uuid TEXT PRIMARY KEY REFERENCES jobs (job_uuid) ON DELETE CASCADE, -- builds without this table delete jobs, too
    call TEXT NOT NULL,                     -- the last part of its path, such as supervised-fine-tune
    body BLOB NOT NULL                      -- JSON, compressed by zlib: the fields that were set
) STRICT, WITHOUT ROWID;

-- Builds of this version have had requests as texts in a table of this name: its references would prevent the deletion of jobs.
DROP TABLE IF EXISTS requests;

-- The jobs that a job comes after. Those may be deleted once they have completed.
CREATE TABLE IF NOT EXISTS predecessors (
    job_uuid TEXT NOT NULL REFERENCES jobs (job_uuid),
    predecessor TEXT NOT NULL,
    position INTEGER NOT NULL,              -- in the job's list
    cancel_with INTEGER NOT NULL,           -- 1: a cancel of the predecessor cancels the job
    base TEXT,                              -- the predecessor's checkpoint that the job begins with; NULL: none
    PRIMARY KEY (job_uuid, predecessor)
) STRICT, WITHOUT ROWID;

CREATE INDEX IF NOT EXISTS predecessors_by_predecessor ON predecessors (predecessor);

-- The trials of searches: each is a job, and so is the search, which has no attempts. They are deleted together.
CREATE TABLE IF NOT EXISTS trials (
    search TEXT NOT NULL REFERENCES jobs (job_uuid),
    number INTEGER NOT NULL,                -- from 1
    job_uuid TEXT NOT NULL UNIQUE REFERENCES jobs (job_uuid),
    parameters TEXT NOT NULL,               -- JSON: path of a request field -> its value
    rung INTEGER NOT NULL DEFAULT 0,        -- rungs at which it was decided that it continues
    pruned TEXT NOT NULL DEFAULT '',        -- why it does not; '': it does. This and rung are recorded before they are acted on
    resumed_attempt INTEGER NOT NULL DEFAULT 0, -- the attempt that ended at a rung and was resumed last
    PRIMARY KEY (search, number)
) STRICT, WITHOUT ROWID;

-- One row per try. The cursor counts the bytes of events.jsonl that the other columns and tables reflect.
CREATE TABLE IF NOT EXISTS attempts (
    job_uuid TEXT NOT NULL REFERENCES jobs (job_uuid),
    attempt INTEGER NOT NULL,
    run_dir TEXT NOT NULL,
    device TEXT NOT NULL,
    launched_at REAL NOT NULL,
    resume_from TEXT,                       -- checkpoint directory it resumed from
    started_at REAL,
    ended_at REAL,
    reason TEXT,                            -- why it ended, if not by finishing
    message TEXT NOT NULL DEFAULT '',
    event_offset INTEGER NOT NULL DEFAULT 0,
    finished INTEGER NOT NULL DEFAULT 0,    -- 1: the `finished` event was read
    paused_at_step INTEGER,                 -- of the `paused` event
    failed TEXT,                            -- the `failed` event as JSON
    prepared TEXT,                          -- the `prepared` event as JSON
    prepared_at REAL,
    total_steps INTEGER,
    start_step INTEGER NOT NULL DEFAULT 0,  -- steps that the checkpoint brought along
    step INTEGER NOT NULL DEFAULT 0,        -- this and stepped_at: of the last `progress` event
    stepped_at REAL,
    progress TEXT NOT NULL DEFAULT '{}',    -- events.ProgressValues as JSON, of the `progress` events so far
    PRIMARY KEY (job_uuid, attempt)
) STRICT, WITHOUT ROWID;

-- Metric points. The last attempt to reach a step is the one that counts.
CREATE TABLE IF NOT EXISTS points (
    job_uuid TEXT NOT NULL REFERENCES jobs (job_uuid),
    step INTEGER NOT NULL,
    kind TEXT NOT NULL,                     -- train or validation
    attempt INTEGER NOT NULL,
    time REAL NOT NULL,
    epoch REAL NOT NULL,
    metrics TEXT NOT NULL,                  -- JSON
    PRIMARY KEY (job_uuid, step, kind)
) STRICT, WITHOUT ROWID;

-- The last evaluations of a job: without it they are looked for in all of its points, up to 200,000.
CREATE INDEX IF NOT EXISTS points_of_validation ON points (job_uuid, step) WHERE kind = 'validation';

-- The model's answers to the prompts of the job's `samples`, and those that train it to a prompt of a step (kind rollout). As with
-- points, the last attempt to reach a step counts.
CREATE TABLE IF NOT EXISTS samples (
    job_uuid TEXT NOT NULL REFERENCES jobs (job_uuid),
    step INTEGER NOT NULL,
    kind TEXT NOT NULL,                     -- before, checkpoint, after or rollout
    attempt INTEGER NOT NULL,
    time REAL NOT NULL,
    epoch REAL NOT NULL,
    answers TEXT NOT NULL,                  -- JSON array of events.Answer, in the order of the prompts; of rollout events.RolledOut
    PRIMARY KEY (job_uuid, step, kind)
) STRICT;

CREATE TABLE IF NOT EXISTS checkpoints (
    job_uuid TEXT NOT NULL REFERENCES jobs (job_uuid),
    path TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    kind TEXT NOT NULL,                     -- step, final or merged
    step INTEGER NOT NULL,
    epoch INTEGER NOT NULL,
    created_at REAL NOT NULL,
    train_loss REAL,
    validation_loss REAL,
    perplexity REAL,
    PRIMARY KEY (job_uuid, path)
) STRICT, WITHOUT ROWID;

-- What the user should know, each sentence once per job, in the order of its first report.
CREATE TABLE IF NOT EXISTS warnings (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    job_uuid TEXT NOT NULL REFERENCES jobs (job_uuid),
    message TEXT NOT NULL,
    step INTEGER,                           -- the last step that was reported before it; NULL: before the training
    UNIQUE (job_uuid, message)
) STRICT;

-- Trackers that get the points of a job, with the cursor of each. Only the exporter changes a row.
CREATE TABLE IF NOT EXISTS exports (
    job_uuid TEXT NOT NULL REFERENCES jobs (job_uuid),
    tracker TEXT NOT NULL,
    project TEXT NOT NULL,
    run TEXT NOT NULL,
    key TEXT NOT NULL,                      -- random: the tracker's copy carries it, and no other job's does
    generation INTEGER NOT NULL DEFAULT 1,  -- raised when the copy is begun again, since points were superseded
    attempt INTEGER NOT NULL DEFAULT 0,     -- the last attempt whose resume point was compared with the cursor
    sent_step INTEGER NOT NULL DEFAULT -1,  -- the tracker may have points up to this step
    step INTEGER NOT NULL DEFAULT -1,       -- the tracker has accepted all points up to this step
    position TEXT NOT NULL DEFAULT '{}',    -- the cursor in the tracker's own terms, JSON
    finished INTEGER NOT NULL DEFAULT 0,    -- 1: the job has ended and the tracker has all of it
    error TEXT NOT NULL DEFAULT '',         -- why the last try failed; '': it did not
    PRIMARY KEY (job_uuid, tracker)
) STRICT, WITHOUT ROWID;

CREATE INDEX IF NOT EXISTS exports_unfinished ON exports (tracker) WHERE finished = 0;

-- Machines that have joined, the service's own among them where it has an agent.
CREATE TABLE IF NOT EXISTS nodes (
    name TEXT PRIMARY KEY,
    machine_id TEXT NOT NULL,
    boot_id TEXT NOT NULL,
    report TEXT NOT NULL,                   -- wire.NodeReport as JSON
    joined_at REAL NOT NULL,
    seen_at REAL NOT NULL,                  -- to a few seconds; who decides on its silence keeps count by itself
    mode TEXT NOT NULL DEFAULT 'open',      -- open, cordoned or draining
    revision INTEGER NOT NULL DEFAULT 1     -- raised by every change of its orders
) STRICT;

-- What each node of an attempt is to do (desired) and what it last reported (observed).
CREATE TABLE IF NOT EXISTS tasks (
    task_id TEXT NOT NULL,
    node TEXT NOT NULL,
    job_uuid TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    node_rank INTEGER NOT NULL,
    places TEXT NOT NULL,                   -- its devices as the attempt writes them, with commas between them
    stage TEXT NOT NULL,                    -- wire.Stage: how far it is to be
    task_order TEXT NOT NULL,               -- wire.TaskOrder as JSON; its stage does not count
    report TEXT,                            -- wire.TaskReport as JSON
    ending TEXT,                            -- how the attempt ends, once that is decided: Observation as JSON
    gone INTEGER NOT NULL DEFAULT 0,        -- 1: nothing of it is left on the node; until then its devices are taken
    PRIMARY KEY (task_id, node)
) STRICT, WITHOUT ROWID;

CREATE INDEX IF NOT EXISTS tasks_by_node ON tasks (node, gone);

CREATE TRIGGER IF NOT EXISTS task_ordered AFTER INSERT ON tasks
BEGIN UPDATE nodes SET revision = revision + 1 WHERE name = NEW.node; END;
CREATE TRIGGER IF NOT EXISTS task_changed AFTER UPDATE OF stage, task_order, gone ON tasks
BEGIN UPDATE nodes SET revision = revision + 1 WHERE name = NEW.node; END;

-- What nodes authenticate with, as hashes. A join issues one; those before it expire once it has been used.
CREATE TABLE IF NOT EXISTS node_credentials (
    number INTEGER PRIMARY KEY AUTOINCREMENT,  -- order of issue
    sha256 TEXT NOT NULL UNIQUE,
    node TEXT NOT NULL,
    used INTEGER NOT NULL DEFAULT 0,        -- 1: the node has called with it, so its join's answer was not lost
    revoked INTEGER NOT NULL DEFAULT 0,     -- 1: the node was removed; kept so that its agent is informed
    expires_at REAL
) STRICT;

CREATE INDEX IF NOT EXISTS node_credentials_by_node ON node_credentials (node, number);

-- How loaded each machine was: means of minutes, for a day (loads.KEPT_SECONDS).
CREATE TABLE IF NOT EXISTS loads (
    node TEXT NOT NULL,
    minute INTEGER NOT NULL,                -- its begin
    load TEXT NOT NULL,                     -- wire.Load as JSON
    PRIMARY KEY (node, minute)
) STRICT, WITHOUT ROWID;

-- Machines that were requested of pools. A row is written before the request is sent.
CREATE TABLE IF NOT EXISTS allocations (
    request_id TEXT PRIMARY KEY,
    pool TEXT NOT NULL,
    nodes INTEGER NOT NULL,
    state TEXT NOT NULL,                    -- pooling.AllocationState
    requested_for TEXT NOT NULL,                -- the job that lacked them; it may have been deleted since
    recorded_at REAL NOT NULL,
    granted_at REAL,
    ended_at REAL,
    message TEXT NOT NULL DEFAULT '',
    handle TEXT NOT NULL DEFAULT ''         -- what the pool finds it by
) STRICT, WITHOUT ROWID;

CREATE INDEX IF NOT EXISTS allocations_by_end ON allocations (ended_at);

-- Tokens that admins create while the service runs. The tokens of its configuration are not here.
CREATE TABLE IF NOT EXISTS tokens (
    name TEXT PRIMARY KEY,
    -- A plain sha256: the token is 256 random bits, which no search finds. Slow hashes are for passwords that people
    -- choose, and would cost every request tens of milliseconds.
    sha256 TEXT NOT NULL UNIQUE,
    role TEXT NOT NULL,                     -- metrics, read, submit, node or admin
    created_at REAL NOT NULL,
    created_by TEXT NOT NULL,               -- name of the admin's token
    expires_at REAL,                        -- NULL: never
    last_used_at REAL,                      -- to a minute
    limits TEXT NOT NULL                    -- tokens.Limits as JSON
) STRICT;

-- Totals of everything that ever happened here, deleted jobs included; never lowered. Each is raised in the transaction of
-- what it counts, so nothing is lost and nothing counts twice.
CREATE TABLE IF NOT EXISTS totals (
    name TEXT NOT NULL,                     -- see totals.py
    labels TEXT NOT NULL,                   -- JSON array of texts
    value REAL NOT NULL,
    PRIMARY KEY (name, labels)
) STRICT, WITHOUT ROWID;

CREATE TRIGGER IF NOT EXISTS job_ended AFTER UPDATE OF state ON jobs
WHEN NEW.state IN ('completed', 'failed', 'cancelled') AND OLD.state NOT IN ('completed', 'failed', 'cancelled')
BEGIN
    INSERT INTO totals VALUES (
        'jobs_finished',
        json_array(CASE WHEN json_valid(NEW.spec) THEN coalesce(json_extract(NEW.spec, '$.train.method.algorithm'), '') ELSE '' END,
                   NEW.state, CASE NEW.state WHEN 'failed' THEN coalesce(NEW.reason, '') ELSE '' END),
        1)
    ON CONFLICT (name, labels) DO UPDATE SET value = value + 1;
END;
-- Why an attempt ended: the reason of a failure, else how its job left it. The job's state is changed before.
CREATE TRIGGER IF NOT EXISTS attempt_ended AFTER UPDATE OF ended_at ON attempts
WHEN OLD.ended_at IS NULL AND NEW.ended_at IS NOT NULL
BEGIN
    INSERT INTO totals
    SELECT 'attempts_ended',
           json_array(coalesce(NEW.reason, CASE state WHEN 'scheduled' THEN 'moved' ELSE state END)), 1
    FROM jobs WHERE job_uuid = NEW.job_uuid
    ON CONFLICT (name, labels) DO UPDATE SET value = value + 1;
END;

-- Addresses that are told how jobs of OpenAI's API end, as the settings of the last start had them; a row per state.
CREATE TABLE IF NOT EXISTS webhooks (
    url TEXT NOT NULL,
    state TEXT NOT NULL,                    -- completed, failed or cancelled
    PRIMARY KEY (url, state)
) STRICT, WITHOUT ROWID;

-- What they have not been told yet: written with the end of the job, which may be deleted before it is delivered.
CREATE TABLE IF NOT EXISTS webhook_deliveries (
    url TEXT NOT NULL,
    job_uuid TEXT NOT NULL,
    state TEXT NOT NULL,
    ended_at REAL NOT NULL,
    tries INTEGER NOT NULL DEFAULT 0,       -- this and not_before are recorded before it is sent
    not_before REAL NOT NULL DEFAULT 0,     -- waits for its next try until then
    PRIMARY KEY (url, job_uuid)
) STRICT, WITHOUT ROWID;

CREATE INDEX IF NOT EXISTS webhook_deliveries_by_time ON webhook_deliveries (url, not_before, ended_at);

-- Addresses that have asked for time: no delivery to them, new ones included, comes before.
CREATE TABLE IF NOT EXISTS webhook_rests (
    url TEXT PRIMARY KEY,
    rests_until REAL NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TRIGGER IF NOT EXISTS webhook_due AFTER UPDATE OF state ON jobs
WHEN NEW.state IN ('completed', 'failed', 'cancelled') AND OLD.state NOT IN ('completed', 'failed', 'cancelled')
     AND CASE WHEN json_valid(NEW.spec) THEN json_extract(NEW.spec, '$.metadata.openai') IS NOT NULL ELSE 0 END
BEGIN
    INSERT INTO webhook_deliveries (url, job_uuid, state, ended_at)
    SELECT url, NEW.job_uuid, NEW.state, coalesce(NEW.completed_at, NEW.scheduled_at) FROM webhooks WHERE state = NEW.state
    ON CONFLICT (url, job_uuid) DO NOTHING;
END;

-- Rows that tokens have uploaded or registered, for their quotas. Those of the inline provider have none.
CREATE TABLE IF NOT EXISTS stored_rows (
    sha256 TEXT NOT NULL,
    owner TEXT NOT NULL,                    -- name of the token
    dataset_id TEXT NOT NULL,               -- '': uploaded, and no dataset has them
    bytes INTEGER NOT NULL,
    PRIMARY KEY (sha256, owner, dataset_id)
) STRICT, WITHOUT ROWID;

CREATE INDEX IF NOT EXISTS stored_rows_by_dataset ON stored_rows (dataset_id);

-- Their sum for each token, in which rows of several datasets count once: each request reads it.
CREATE TABLE IF NOT EXISTS stored_bytes (
    owner TEXT PRIMARY KEY,
    bytes INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TRIGGER IF NOT EXISTS rows_stored AFTER INSERT ON stored_rows
WHEN NOT EXISTS (SELECT 1 FROM stored_rows
                 WHERE sha256 = NEW.sha256 AND owner = NEW.owner AND dataset_id <> NEW.dataset_id)
BEGIN
    INSERT INTO stored_bytes VALUES (NEW.owner, NEW.bytes) ON CONFLICT (owner) DO UPDATE SET bytes = bytes + NEW.bytes;
END;
CREATE TRIGGER IF NOT EXISTS rows_forgotten AFTER DELETE ON stored_rows
WHEN NOT EXISTS (SELECT 1 FROM stored_rows WHERE sha256 = OLD.sha256 AND owner = OLD.owner)
BEGIN
    UPDATE stored_bytes SET bytes = bytes - OLD.bytes WHERE owner = OLD.owner;
    DELETE FROM stored_bytes WHERE owner = OLD.owner AND bytes = 0;
END;

-- One job with its current attempt and its warnings: what a JobRecord is made of.
CREATE VIEW IF NOT EXISTS job_records AS
SELECT jobs.*, run_dir, prepared, prepared_at, total_steps, start_step, step, stepped_at, progress,
       (SELECT json_group_array(message) FROM (SELECT message FROM warnings WHERE warnings.job_uuid = jobs.job_uuid
                                               ORDER BY number)) AS warnings
FROM jobs LEFT JOIN attempts ON attempts.job_uuid = jobs.job_uuid AND attempts.attempt = jobs.attempt;

PRAGMA user_version = 1;
COMMIT;
