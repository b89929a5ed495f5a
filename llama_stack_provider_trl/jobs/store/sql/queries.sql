-- Every statement of the store, by name. `name:` starts one; the rest of the line describes its use.

-- name: insert_job
-- A job whose job_uuid is taken is left as it is; the caller compares request_digest.
INSERT INTO jobs (job_uuid, request_digest, spec, state, scheduled_at, wanted_device, priority, ranks, checkpoint_dir,
                  demand, created_by, blocked)
VALUES (:job_uuid, :request_digest, :spec, 'scheduled', :now, :wanted_device, :priority, :ranks, :checkpoint_dir,
        :demand, :created_by, :blocked)
ON CONFLICT (job_uuid) DO NOTHING;

-- name: count_waiting
-- Jobs of one creator that wait. A paused job counts: otherwise pausing would be a way around the limit.
SELECT count(*) AS jobs FROM jobs WHERE state IN ('scheduled', 'paused') AND created_by = :created_by;

-- name: select_state
SELECT state FROM jobs WHERE job_uuid = :job_uuid;

-- name: select_age
SELECT age FROM jobs WHERE job_uuid = :job_uuid;

-- name: request_digest
SELECT request_digest FROM jobs WHERE job_uuid = :job_uuid;

-- name: insert_warning
-- A repeated warning, for example of a second attempt, is stored once. Of the first 200 only: they are part of the job's record,
-- which is read at every pass.
INSERT INTO warnings (job_uuid, message, step)
SELECT :job_uuid, :message,
       (SELECT attempts.step FROM jobs JOIN attempts USING (job_uuid, attempt)
        WHERE job_uuid = :job_uuid AND prepared IS NOT NULL)
WHERE (SELECT count(*) FROM warnings WHERE job_uuid = :job_uuid) < 200
ON CONFLICT (job_uuid, message) DO NOTHING;

-- name: select_job
SELECT * FROM job_records WHERE job_uuid = :job_uuid;

-- name: select_jobs
SELECT * FROM job_records ORDER BY age;

-- name: select_mentions
-- Texts with the digests of all rows that jobs have: those that a job reads of an earlier one stand in that one's result.
SELECT spec AS text FROM jobs
UNION ALL SELECT prepared FROM predecessors JOIN jobs USING (job_uuid) JOIN attempts ON attempts.job_uuid = predecessor
WHERE base IS NOT NULL AND prepared IS NOT NULL AND state NOT IN ('completed', 'failed', 'cancelled');

-- name: select_names
SELECT job_uuid FROM jobs ORDER BY age;

-- name: select_name_page
-- A page of the list, oldest first: jobs younger than `after` (null: all), in one of the states (null: any).
SELECT job_uuid FROM jobs
WHERE age > coalesce((SELECT age FROM jobs WHERE job_uuid = :after), 0)
  AND (:states IS NULL OR state IN (SELECT value FROM json_each(:states)))
ORDER BY age LIMIT :limit;

-- name: select_newest
-- Jobs whose names begin alike, newest first: those older than `after` (null: all). It reads an index only, from its end on
-- and as far as the limit goes: for names that most jobs have.
SELECT job_uuid FROM jobs INDEXED BY jobs_by_age
WHERE age < CASE WHEN :after IS NULL THEN 9223372036854775807 ELSE (SELECT age FROM jobs WHERE job_uuid = :after) END
  AND +job_uuid >= :prefix AND +job_uuid < :prefix || '~'
ORDER BY age DESC LIMIT :limit;

-- name: select_named_alike
-- The same for names that few jobs have: it reads these alone in the index of names.
SELECT job_uuid FROM jobs WHERE job_uuid >= :prefix AND job_uuid < :prefix || '~' ORDER BY age DESC LIMIT :limit;

-- name: select_first_trained_from
-- Of the completed jobs that were made from a model, the one that completed first: when it was submitted.
SELECT scheduled_at FROM jobs INDEXED BY jobs_by_model
WHERE CASE WHEN json_valid(spec) THEN json_extract(spec, '$.source.model') END = :model AND state = 'completed'
ORDER BY completed_at LIMIT 1;

-- name: select_newest_with
-- The same of jobs with all pairs of `metadata` (a JSON object). Specifications without one of the pairs as text
-- (`fragment`) are not parsed: of 20,000 that takes a second.
SELECT job_uuid FROM jobs
WHERE +job_uuid >= :prefix AND +job_uuid < :prefix || '~'
  AND (:after IS NULL OR age < (SELECT age FROM jobs WHERE job_uuid = :after))
  AND CASE WHEN instr(spec, :fragment) = 0 OR NOT json_valid(spec) THEN 0
           ELSE NOT EXISTS (SELECT 1 FROM json_each(:metadata) AS wanted WHERE NOT EXISTS (
               SELECT 1 FROM json_each(spec, '$.metadata') AS pair WHERE pair.key = wanted.key AND pair.value = wanted.value)) END
ORDER BY age DESC LIMIT :limit;

-- name: select_completed_after
-- Completed jobs whose names begin alike, by their end and name: those beyond such a place. It reads an index only.
SELECT job_uuid, completed_at FROM jobs INDEXED BY jobs_by_end
WHERE state = 'completed' AND (completed_at, job_uuid) > (:at, :name)
  AND +job_uuid >= :prefix AND +job_uuid < :prefix || '~'
ORDER BY completed_at, job_uuid LIMIT :limit;

-- name: select_completed_before
-- The same backwards.
SELECT job_uuid, completed_at FROM jobs INDEXED BY jobs_by_end
WHERE state = 'completed' AND (completed_at, job_uuid) < (:at, :name)
  AND +job_uuid >= :prefix AND +job_uuid < :prefix || '~'
ORDER BY completed_at DESC, job_uuid DESC LIMIT :limit;

-- name: select_with_result
-- Those of some jobs (a JSON array) that have a result.
SELECT DISTINCT job_uuid FROM checkpoints WHERE kind = 'final' AND job_uuid IN (SELECT value FROM json_each(:names));

-- name: select_page
-- As select_name_page, with what a list shows; of the specs no more than that is read.
SELECT job_uuid, state, CASE WHEN json_valid(spec) THEN coalesce(json_extract(spec, '$.work.kind'), json_extract(spec, '$.train.method.type'), json_extract(spec, '$.train.method.algorithm')) END AS algorithm,
       CASE WHEN json_valid(spec) THEN json_extract(spec, '$.source.model') END AS model,
       priority, step, total_steps, detail, jobs.message, scheduled_at, jobs.started_at, completed_at, created_by
FROM jobs LEFT JOIN attempts USING (job_uuid, attempt)
WHERE age > coalesce((SELECT age FROM jobs WHERE job_uuid = :after), 0)
  AND (:states IS NULL OR state IN (SELECT value FROM json_each(:states)))
ORDER BY age LIMIT :limit;

-- name: select_queue_page
-- Jobs in the order in which they run: those with processes, those that wait (as `placement.place` sorts them; after these
-- the ones that wait for other jobs or for the time of their next attempt), paused ones, then those that have ended, the last one first.
-- `Queued.claim` sorts those that wait. Or by a column (`sort`; jobs without a value last). The names are sorted first: a sort of whole
-- rows would extract the model from every spec.
-- Folded: trials stand under their search, and jobs that come after another under that one. A family has the place of the first of its
-- members. `part`: of `search`, without the `=` between name and value. `families`: a JSON array of the jobs whose families are wanted, without these jobs themselves; NULL: all jobs, and of a
-- family the first one alone. With `families` the limit is one of each family, and takes what runs before all else: trials the
-- newest first, jobs of a chain the first one first; and of all families together `together` are taken, from each as many as from others.
WITH RECURSIVE parents(job_uuid, parent) AS MATERIALIZED (
    SELECT job_uuid, search FROM trials WHERE :folded
    UNION ALL
    -- The first that is there: SQLite takes `predecessor` from the row of the minimum.
    SELECT job_uuid, predecessor FROM (
        SELECT link.job_uuid, predecessor, min(position) FROM predecessors AS link
        JOIN jobs ON jobs.job_uuid = predecessor
        WHERE :folded AND NOT EXISTS (SELECT 1 FROM trials WHERE trials.job_uuid = link.job_uuid)
          -- What reads a model without training it stands by itself, as where the model is of no job.
          AND NOT EXISTS (SELECT 1 FROM jobs WHERE jobs.job_uuid = link.job_uuid AND CASE WHEN json_valid(spec) THEN json_extract(spec, '$.work.kind') END IS NOT NULL)
        GROUP BY link.job_uuid)),
family(job_uuid, root) AS (
    SELECT parent, parent FROM parents WHERE parent NOT IN (SELECT job_uuid FROM parents)
    UNION
    SELECT parents.job_uuid, root FROM family CROSS JOIN parents ON parents.parent = family.job_uuid),
listed AS MATERIALIZED (
    SELECT age, job_uuid, state, not_before, completed_at,
           CASE WHEN state IN ('launching', 'in_progress', 'pausing', 'cancelling') THEN 0
                WHEN state = 'scheduled' THEN 1 + (blocked OR not_before > :now)
                WHEN state = 'paused' THEN 3 ELSE 4 END AS part,
           CASE WHEN state = 'paused' THEN -priority
                ELSE -max(priority, min(:highest, priority + CAST(max(0, :now - max(scheduled_at, not_before)) / :aging AS INTEGER))) END AS claim,
           CASE :sort
               WHEN 'name' THEN lower(job_uuid)
               WHEN 'match' THEN CASE instr(lower(job_uuid), lower(:search)) WHEN 1 THEN 0 WHEN 0 THEN 2 ELSE 1 END
               WHEN 'state' THEN state
               WHEN 'owner' THEN nullif(lower(created_by), '')
               WHEN 'created' THEN age
               WHEN 'duration' THEN coalesce(completed_at, :now) - started_at
               WHEN 'method' THEN CASE WHEN json_valid(spec) THEN coalesce(json_extract(spec, '$.work.kind'), json_extract(spec, '$.train.method.type'), json_extract(spec, '$.train.method.algorithm')) END
               WHEN 'model' THEN CASE WHEN json_valid(spec) THEN (SELECT lower(substr(model, 1 + length(rtrim(model, replace(model, '/', '')))))
                    FROM (SELECT rtrim(json_extract(spec, '$.source.model'), '/') AS model)) END
               WHEN 'loss' THEN (SELECT CASE WHEN json_valid(progress) THEN json_extract(progress, '$.loss') END FROM attempts
                                 WHERE attempts.job_uuid = jobs.job_uuid AND attempts.attempt = jobs.attempt)
               WHEN 'progress' THEN (SELECT step * 1.0 / total_steps FROM attempts
                                     WHERE attempts.job_uuid = jobs.job_uuid AND attempts.attempt = jobs.attempt)
               WHEN 'eval' THEN (SELECT CASE WHEN json_valid(metrics) THEN json_extract(metrics, '$.eval_loss') END FROM points
                                 WHERE points.job_uuid = jobs.job_uuid AND kind = 'validation' ORDER BY points.step DESC LIMIT 1)
           END AS value
    FROM jobs
    WHERE (:state IS NULL OR state = :state) AND (:owner IS NULL OR created_by = :owner)
      AND (:search = '' OR instr(lower(job_uuid), lower(:search)) > 0
           OR CASE WHEN instr(lower(spec), lower(:part)) = 0 OR NOT json_valid(spec) THEN 0
                   ELSE instr(lower(json_extract(spec, '$.source.model')), lower(:search)) > 0
                        OR EXISTS (SELECT 1 FROM json_each(spec, '$.metadata') AS pair WHERE pair.key <> :reserved
                                   AND instr(lower(pair.key || '=' || pair.value), lower(:search)) > 0) END)),
families(root, part, members, best) AS MATERIALIZED (
    SELECT root, min(part), group_concat(CASE WHEN family.job_uuid <> root THEN state END),
           min(CASE WHEN typeof(value) <> 'text' THEN value END)
    FROM family JOIN listed ON listed.job_uuid = family.job_uuid GROUP BY root),
page AS (
    SELECT listed.age, coalesce(families.part, listed.part) AS part, listed.part AS own_part, claim, listed.not_before, listed.completed_at,
           coalesce(value, CASE WHEN :sort IN ('loss', 'eval') THEN best END) AS value,
           nullif(members, '') AS members, family.root AS root,
           CASE WHEN :families IS NOT NULL AND EXISTS (SELECT 1 FROM trials WHERE trials.job_uuid = listed.job_uuid) THEN -listed.age
                WHEN :families IS NOT NULL THEN listed.age END AS below
    FROM listed LEFT JOIN family ON family.job_uuid = listed.job_uuid
    LEFT JOIN families ON families.root = listed.job_uuid AND :families IS NULL
    WHERE CASE WHEN :families IS NULL THEN family.root IS NULL OR family.root = listed.job_uuid
               ELSE family.root <> listed.job_uuid AND family.root IN (SELECT value FROM json_each(:families))
                    AND (listed.part = 0 OR family.root IN (SELECT value FROM json_each(:opened))) END),
sorted AS MATERIALIZED (
    SELECT *, count(*) OVER () AS matching, row_number() OVER (
        ORDER BY value IS NULL, CASE WHEN :descending THEN NULL ELSE value END, CASE WHEN :descending THEN value END DESC,
                 CASE WHEN :families IS NOT NULL THEN own_part <> 0 END, below,
                 part, CASE WHEN own_part IN (1, 3) THEN claim END, CASE WHEN own_part = 2 THEN not_before END,
                 CASE WHEN part = 4 THEN -coalesce(completed_at, 0) END, age) AS place
    FROM page),
taken AS (
    SELECT * FROM (SELECT age, members, root, matching, place FROM sorted
                   WHERE :families IS NULL ORDER BY place LIMIT :limit OFFSET :offset)
    UNION ALL
    SELECT * FROM (SELECT age, members, root, matching, place FROM (
        SELECT *, row_number() OVER (PARTITION BY root ORDER BY own_part <> 0, place) AS number FROM sorted WHERE :families IS NOT NULL)
        WHERE number <= :limit ORDER BY own_part <> 0, number, place LIMIT :together))
SELECT job_uuid, state, CASE WHEN json_valid(spec) THEN coalesce(json_extract(spec, '$.work.kind'), json_extract(spec, '$.train.method.type'), json_extract(spec, '$.train.method.algorithm')) END AS algorithm,
       CASE WHEN json_valid(spec) THEN json_extract(spec, '$.source.model') END AS model,
       CASE WHEN json_valid(spec) THEN coalesce(json_extract(spec, '$.adapter.made_by.job_uuid'), json_extract(spec, '$.source.made_by.job_uuid')) END AS model_job,
       CASE WHEN json_valid(spec) THEN json_extract(spec, '$.metadata') END AS metadata,
       priority, step, total_steps, detail, jobs.message, jobs.reason, scheduled_at, jobs.started_at, jobs.completed_at, created_by,
       prepared_at, stepped_at, start_step, CASE WHEN json_valid(progress) THEN json_extract(progress, '$.loss') END AS loss,
       (SELECT CASE WHEN json_valid(metrics) THEN json_extract(metrics, '$.eval_loss') END FROM points
        WHERE points.job_uuid = jobs.job_uuid AND kind = 'validation' ORDER BY points.step DESC LIMIT 1) AS eval_loss,
       members, root, (SELECT search FROM trials WHERE trials.job_uuid = jobs.job_uuid) AS search, matching,
       (SELECT min(CASE WHEN json_valid(tried.progress) THEN json_extract(tried.progress, '$.loss') END)
        FROM trials JOIN jobs AS trial ON trial.job_uuid = trials.job_uuid
        JOIN attempts AS tried ON tried.job_uuid = trial.job_uuid AND tried.attempt = trial.attempt
        WHERE trials.search = jobs.job_uuid) AS best_loss,
       (SELECT min((SELECT CASE WHEN json_valid(metrics) THEN json_extract(metrics, '$.eval_loss') END FROM points
                    WHERE points.job_uuid = trials.job_uuid AND kind = 'validation' ORDER BY points.step DESC LIMIT 1))
        FROM trials WHERE trials.search = jobs.job_uuid) AS best_eval_loss
FROM taken JOIN jobs USING (age) LEFT JOIN attempts USING (job_uuid, attempt)
ORDER BY place;

-- name: select_sparks
-- For each of some jobs (a JSON array) at most `points` of its training points, evenly over its steps, the first and the last among them.
WITH RECURSIVE wanted(job_uuid) AS (SELECT value FROM json_each(:names)),
ends AS (
    SELECT job_uuid, (SELECT min(step) FROM points WHERE points.job_uuid = wanted.job_uuid) AS first,
           (SELECT max(step) FROM points WHERE points.job_uuid = wanted.job_uuid) AS last
    FROM wanted),
numbers(number) AS (SELECT 0 UNION ALL SELECT number + 1 FROM numbers WHERE number < :points - 1),
steps AS MATERIALIZED (
    SELECT DISTINCT job_uuid, first + (last - first) * number / (:points - 1) AS step FROM ends JOIN numbers WHERE first IS NOT NULL)
SELECT job_uuid, (SELECT metrics FROM points WHERE points.job_uuid = steps.job_uuid AND points.step >= steps.step
                  AND kind = 'train' ORDER BY points.step LIMIT 1) AS metrics
FROM steps ORDER BY job_uuid, step;

-- name: count_states
SELECT state, count(*) AS jobs FROM jobs GROUP BY state;

-- name: select_event_files
-- Where the events of a job are and how far they count, from attempt `first` on; one row without run_dir: no attempt.
SELECT state, attempts.attempt, run_dir, event_offset
FROM jobs LEFT JOIN attempts ON attempts.job_uuid = jobs.job_uuid AND attempts.attempt >= :first
WHERE jobs.job_uuid = :job_uuid ORDER BY attempts.attempt;

-- name: select_run_dirs
-- Run directories whose processes belong to a job: the current attempts of jobs in states.ACTIVE.
SELECT run_dir FROM jobs JOIN attempts USING (job_uuid, attempt)
WHERE state IN ('launching', 'in_progress', 'pausing', 'cancelling');

-- name: select_neighbour
-- A job whose checkpoints lie in the same directory or above (`here_or_above`), or below: from `ours/` up to `ours0`,
-- since 0 follows the slash.
SELECT job_uuid FROM jobs
WHERE checkpoint_dir IN (SELECT value FROM json_each(:here_or_above))
   OR (checkpoint_dir > :ours || '/' AND checkpoint_dir < :ours || '0')
LIMIT 1;

-- name: select_at_directory
SELECT job_uuid FROM jobs WHERE checkpoint_dir IN (:directory, :above);

-- name: select_active
-- Jobs of which processes may exist (states.ACTIVE); a search has none. Runs several times a second: it must use the index.
SELECT * FROM job_records WHERE state IN ('launching', 'in_progress', 'pausing', 'cancelling') AND attempt > 0 ORDER BY age;

-- name: select_places
-- Of the jobs in states.ACTIVE. As often as select_active, and of no more than is needed.
SELECT job_uuid, device AS places FROM jobs
WHERE state IN ('launching', 'in_progress', 'pausing', 'cancelling') AND attempt > 0;

-- name: select_queue
-- A `Queued` for each job that waits, oldest first; not of those that wait for other jobs, or for their next try.
SELECT job_uuid, wanted_device, age, priority, detail, ranks, max(scheduled_at, not_before), demand, attempt > 0,
    CASE WHEN attempt > 0 THEN coalesce((SELECT group_concat(device) FROM attempts
        WHERE attempts.job_uuid = jobs.job_uuid AND reason = 'launch_failed'), '') ELSE '' END
FROM jobs WHERE state = 'scheduled' AND not_before <= :now AND NOT blocked ORDER BY age;

-- name: select_as_queued
-- A `Queued` for one job, as it would be if its attempt had ended.
SELECT job_uuid, wanted_device, age, priority, detail, ranks, scheduled_at, demand, attempt > 0, ''
FROM jobs WHERE job_uuid = :job_uuid;

-- name: select_kinds_waiting
-- As select_queue, the oldest of each kind: beside min(), the other columns are of its row.
SELECT job_uuid, wanted_device, min(age), priority, detail, ranks, max(scheduled_at, not_before), demand, attempt > 0 AS tried, ''
FROM jobs WHERE state = 'scheduled' AND not_before <= :now AND NOT blocked GROUP BY wanted_device, ranks, detail, demand, tried;

-- name: select_first_waiting
-- As select_queue, the first jobs as `placement.place` sorts them, with the last attempt of each. Those that wait for their
-- next try, and for other jobs (`after`: those that have not completed), are among them. The limit is applied before attempts
-- are read.
WITH first AS (SELECT age, -max(priority, min(:highest, priority + CAST(max(0, :now - max(scheduled_at, not_before)) / :aging AS INTEGER))) AS claim
               FROM jobs WHERE state = 'scheduled' ORDER BY claim, age LIMIT :limit)
SELECT jobs.job_uuid, wanted_device, age, priority, detail, ranks, max(scheduled_at, not_before), demand, jobs.attempt > 0,
       CASE WHEN jobs.attempt > 0 THEN coalesce((SELECT group_concat(failed.device) FROM attempts AS failed
           WHERE failed.job_uuid = jobs.job_uuid AND failed.reason = 'launch_failed'), '') ELSE '' END,
       not_before, prepared_at, stepped_at, total_steps, start_step, step,
       CASE WHEN blocked THEN coalesce((SELECT group_concat(predecessor) FROM predecessors
           LEFT JOIN jobs AS other ON other.job_uuid = predecessor
           WHERE predecessors.job_uuid = jobs.job_uuid AND other.state IS NOT 'completed'), '') ELSE '' END AS after
FROM first JOIN jobs USING (age) LEFT JOIN attempts ON attempts.job_uuid = jobs.job_uuid AND attempts.attempt = jobs.attempt
ORDER BY claim, age;

-- name: insert_predecessor
INSERT INTO predecessors (job_uuid, predecessor, position, cancel_with, base)
VALUES (:job_uuid, :predecessor, :position, :cancel_with, :base);

-- name: select_blocked
-- The scheduled jobs that wait for others, oldest first, with each of those: one row per pair. Runs at every pass.
SELECT jobs.job_uuid, jobs.attempt, jobs.detail, cancel_with, predecessor, other.state, other.reason,
       attempts.step, attempts.total_steps
FROM jobs JOIN predecessors ON predecessors.job_uuid = jobs.job_uuid
LEFT JOIN jobs AS other ON other.job_uuid = predecessor
LEFT JOIN attempts ON attempts.job_uuid = other.job_uuid AND attempts.attempt = other.attempt
WHERE jobs.blocked = 1 AND jobs.state = 'scheduled' ORDER BY jobs.age, position;

-- name: unblock_job
-- It waits for devices from now on.
UPDATE jobs SET blocked = 0, not_before = :now, detail = '' WHERE job_uuid = :job_uuid AND blocked = 1 AND state = 'scheduled';

-- name: change_blocked_detail
UPDATE jobs SET detail = :detail WHERE job_uuid = :job_uuid AND blocked = 1 AND state = 'scheduled';

-- name: select_after
-- The jobs that a job comes after, in the order of its list. No state: it was deleted.
SELECT predecessor AS job_uuid, state FROM predecessors LEFT JOIN jobs ON jobs.job_uuid = predecessor
WHERE predecessors.job_uuid = :job_uuid ORDER BY position;

-- name: select_before
-- The jobs that come after a job, the oldest first.
SELECT jobs.job_uuid, state FROM predecessors JOIN jobs USING (job_uuid)
WHERE predecessor = :job_uuid ORDER BY age LIMIT :limit;

-- name: select_needing
-- Of those, the ones that still wait, or that begin each attempt with a checkpoint of it.
SELECT jobs.job_uuid FROM predecessors JOIN jobs USING (job_uuid)
WHERE predecessor = :job_uuid AND (blocked = 1 OR base IS NOT NULL) AND state NOT IN ('completed', 'failed', 'cancelled')
ORDER BY age LIMIT 4;

-- name: select_needed_checkpoints
-- Checkpoints of a job that others begin with.
SELECT DISTINCT base FROM predecessors JOIN jobs USING (job_uuid)
WHERE predecessor = :job_uuid AND base IS NOT NULL AND state NOT IN ('completed', 'failed', 'cancelled');

-- name: delete_predecessors
DELETE FROM predecessors WHERE job_uuid = :job_uuid;

-- name: start_search
-- A new search: its trials wait for devices, it does not.
UPDATE jobs SET state = 'in_progress', started_at = :now WHERE job_uuid = :job_uuid AND state = 'scheduled' AND attempt = 0;

-- name: insert_trial
INSERT INTO trials (search, number, job_uuid, parameters) VALUES (:search, :number, :job_uuid, :parameters);

-- name: count_trials
-- Of a search that is in progress; 0: it is not.
SELECT count(*) AS trials FROM trials JOIN jobs ON jobs.job_uuid = trials.search
WHERE trials.search = :job_uuid AND state = 'in_progress';

-- name: select_trials_to_come
-- Of a Bayesian search that is in progress: how many trials there will be, and how many there are.
SELECT CAST(json_extract(spec, '$.search.trials') AS INTEGER) AS trials,
       (SELECT count(*) FROM trials WHERE trials.search = jobs.job_uuid) AS stored
FROM jobs
WHERE job_uuid = :job_uuid AND state = 'in_progress'
  AND CASE WHEN json_valid(spec) THEN json_extract(spec, '$.search.method') END = 'bayesian';

-- name: select_searches
-- The searches that have not ended, oldest first. Runs at every pass.
SELECT job_uuid, state, detail, CASE WHEN json_valid(spec) THEN json_extract(spec, '$.search') END AS search
FROM jobs WHERE state IN ('in_progress', 'cancelling') AND attempt = 0 ORDER BY age;

-- name: select_trials
-- The steps that are planned: a job that stopped early has fewer in its own column.
SELECT number, trials.job_uuid, parameters, rung, pruned, resumed_attempt, state, jobs.attempt, step, paused_at_step,
       (SELECT json_extract(planned.prepared, '$.total_steps') FROM attempts AS planned
        WHERE planned.job_uuid = trials.job_uuid AND planned.prepared IS NOT NULL
        ORDER BY planned.attempt DESC LIMIT 1) AS planned_steps,
       CASE WHEN json_valid(spec) THEN json_extract(spec, '$.train.best_checkpoint') END AS best_checkpoint
FROM trials JOIN jobs USING (job_uuid)
LEFT JOIN attempts ON attempts.job_uuid = jobs.job_uuid AND attempts.attempt = jobs.attempt
WHERE search = :search ORDER BY number;

-- name: select_search_of
SELECT search FROM trials WHERE job_uuid = :job_uuid;

-- name: promote_trial
-- This and the next: what is decided about a rung is decided once.
UPDATE trials SET rung = rung + 1 WHERE search = :search AND number = :number AND rung = :rung AND pruned = '';

-- name: prune_trial
UPDATE trials SET pruned = :why WHERE search = :search AND number = :number AND rung = :rung AND pruned = '';

-- name: note_trial_resumed
UPDATE trials SET resumed_attempt = :attempt WHERE job_uuid = :job_uuid;

-- name: insert_checkpoints_of_best
-- The result of a search: the checkpoints of its best trial.
INSERT INTO checkpoints (job_uuid, path, attempt, kind, step, epoch, created_at, train_loss, validation_loss, perplexity)
SELECT :job_uuid, path, attempt, kind, step, epoch, created_at, train_loss, validation_loss, perplexity
FROM checkpoints WHERE job_uuid = :best
ON CONFLICT (job_uuid, path) DO NOTHING;

-- name: delete_trials
DELETE FROM trials WHERE search = :job_uuid;

-- name: select_paces
-- Of jobs in states.ACTIVE, as they would wait again.
SELECT job_uuid, wanted_device, age, priority, detail, ranks, max(scheduled_at, not_before), demand, 1, '',
       state, attempt, launched_at, prepared_at, stepped_at, total_steps, start_step, step
FROM jobs JOIN attempts USING (job_uuid, attempt) WHERE state IN ('launching', 'in_progress', 'pausing', 'cancelling');

-- name: select_checkpoints
SELECT * FROM checkpoints WHERE job_uuid = :job_uuid
ORDER BY step, CASE kind WHEN 'step' THEN 0 WHEN 'final' THEN 1 ELSE 2 END, path;

-- name: select_attempts
SELECT * FROM attempts WHERE job_uuid = :job_uuid ORDER BY attempt;

-- name: select_seconds
-- How long a job has trained, from `started` of each attempt to its end.
SELECT coalesce(sum(ended_at - started_at), 0) AS seconds FROM attempts WHERE job_uuid = :job_uuid;

-- name: delete_job
-- Only a job that has ended; what refers to it must be gone first.
DELETE FROM jobs WHERE job_uuid = :job_uuid AND state IN ('completed', 'failed', 'cancelled');

-- name: delete_attempts
DELETE FROM attempts WHERE job_uuid = :job_uuid;

-- name: delete_points
DELETE FROM points WHERE job_uuid = :job_uuid;

-- name: delete_samples
DELETE FROM samples WHERE job_uuid = :job_uuid;

-- name: delete_checkpoints
DELETE FROM checkpoints WHERE job_uuid = :job_uuid;

-- name: delete_exports
DELETE FROM exports WHERE job_uuid = :job_uuid;

-- name: select_warnings
-- Of a training, in the order of their first report.
SELECT step, message FROM warnings WHERE job_uuid = :job_uuid AND step IS NOT NULL ORDER BY number;

-- name: insert_request
-- A name may be one of a job that was deleted meanwhile.
INSERT INTO kept_requests (job_uuid, call, body) SELECT job_uuid, :call, :body FROM jobs WHERE job_uuid = :job_uuid
ON CONFLICT (job_uuid) DO NOTHING;

-- name: select_request
SELECT call, body FROM kept_requests WHERE job_uuid = :job_uuid;

-- name: delete_request
DELETE FROM kept_requests WHERE job_uuid = :job_uuid;

-- name: delete_warnings
DELETE FROM warnings WHERE job_uuid = :job_uuid;

-- name: delete_checkpoint
DELETE FROM checkpoints WHERE job_uuid = :job_uuid AND path = :path;

-- name: select_points
SELECT * FROM points WHERE job_uuid = :job_uuid AND step > :after ORDER BY step, kind LIMIT :limit;

-- name: select_point_range
-- The first and the last step of a range that have points.
SELECT min(step) AS first, max(step) AS last FROM points
WHERE job_uuid = :job_uuid AND step BETWEEN :begin AND :end;

-- name: scan_points
-- Read one after the other: a job may have 200,000 of them.
SELECT kind, step, epoch, time, metrics FROM points
WHERE job_uuid = :job_uuid AND step BETWEEN :begin AND :end ORDER BY step, kind;

-- name: select_points_together
-- The points of some steps by their kinds: the steps, and the metrics as items of a JSON array. A job may have 200,000 points: a row
-- of each takes three times as long.
SELECT group_concat(CASE WHEN kind = 'train' THEN step END) AS train_steps,
       group_concat(CASE WHEN kind = 'train' THEN metrics END) AS train_metrics,
       group_concat(CASE WHEN kind <> 'train' THEN step END) AS validation_steps,
       group_concat(CASE WHEN kind <> 'train' THEN metrics END) AS validation_metrics
FROM (SELECT step, kind, metrics FROM points WHERE job_uuid = :job_uuid AND step BETWEEN :begin AND :end ORDER BY step, kind);

-- name: select_step_times
-- When some steps were (a JSON array), by step.
SELECT step, epoch, time FROM json_each(:steps) CROSS JOIN points ON points.step = json_each.value
WHERE job_uuid = :job_uuid AND kind = :kind ORDER BY step;

-- name: select_evaluations
SELECT step, metrics FROM points WHERE job_uuid = :job_uuid AND kind = 'validation' ORDER BY step;

-- name: select_first_points
SELECT step, metrics FROM points WHERE job_uuid = :job_uuid AND kind = 'train' ORDER BY step LIMIT :limit;

-- name: select_last_points
-- The last one first.
SELECT step, metrics FROM points WHERE job_uuid = :job_uuid AND kind = 'train' AND step <= :until
ORDER BY step DESC LIMIT :limit;

-- name: select_last_evaluations
-- The last one first. By its index, which SQLite takes for no better than the key.
SELECT step, metrics FROM points INDEXED BY points_of_validation
WHERE job_uuid = :job_uuid AND kind = 'validation' ORDER BY step DESC LIMIT :limit;

-- name: select_samples
-- Sets of answers in the order in which they were taken.
SELECT step, kind, epoch, time, answers FROM samples WHERE job_uuid = :job_uuid AND kind <> 'rollout'
ORDER BY kind = 'after', step, kind LIMIT :limit OFFSET :offset;

-- name: count_samples
SELECT count(*) AS sets FROM samples WHERE job_uuid = :job_uuid AND kind <> 'rollout';

-- name: select_rollouts
-- The newest first.
SELECT answers FROM samples WHERE job_uuid = :job_uuid AND kind = 'rollout' ORDER BY step DESC LIMIT :limit OFFSET :offset;

-- name: count_rollouts
SELECT count(*) AS sets FROM samples WHERE job_uuid = :job_uuid AND kind = 'rollout';

-- name: select_outcome
SELECT event_offset, finished, paused_at_step, failed FROM attempts WHERE job_uuid = :job_uuid AND attempt = :attempt;

-- name: change_state
-- Every change of state names the state and the attempt it assumes: a second writer finds no row. A job that is resumed waits
-- from now on: the time for which it was paused is no wait for devices.
UPDATE jobs SET state = :target, reason = :reason, message = :message, detail = '',
       completed_at = CASE WHEN :target IN ('completed', 'failed', 'cancelled') THEN :now END,
       not_before = CASE WHEN :source = 'paused' AND :target = 'scheduled' THEN :now ELSE not_before END
WHERE job_uuid = :job_uuid AND attempt = :attempt AND state = :source;

-- name: retry_job
UPDATE jobs SET state = 'scheduled', detail = :detail, retries_used = retries_used + :used, not_before = :not_before
WHERE job_uuid = :job_uuid AND attempt = :attempt AND state = :source;

-- name: correct_waits
-- After the clock was set back by :back seconds. No job waits for longer than :longest; nothing was scheduled in the future.
UPDATE jobs SET scheduled_at = min(scheduled_at, :now),
    not_before = CASE WHEN not_before - :back > :now + :longest THEN :now ELSE max(not_before - :back, min(not_before, :now)) END
WHERE state = 'scheduled' AND (scheduled_at > :now OR not_before - :back > :now + :longest OR (:back > 0 AND not_before > :now));

-- name: end_attempt
UPDATE attempts SET ended_at = :now, reason = :reason, message = :message
WHERE job_uuid = :job_uuid AND attempt = :attempt;

-- name: change_detail
UPDATE jobs SET detail = :detail WHERE job_uuid = :job_uuid AND state = :state;

-- name: change_waiting
UPDATE jobs SET detail = :detail
WHERE state = 'scheduled' AND not_before <= :now AND NOT blocked AND wanted_device = :wanted_device AND ranks = :ranks AND detail = :expected_detail
  AND demand = :demand AND (attempt > 0) = :tried;

-- name: launch_job
-- scheduled -> launching, with the next attempt. All attempts of a job that any node may run get the same kind of device:
-- its dtype depends on it.
UPDATE jobs SET state = 'launching', attempt = attempt + 1, device = :device, detail = '',
       wanted_device = CASE WHEN wanted_device = 'auto' AND demand <> '' THEN :kind ELSE wanted_device END
WHERE job_uuid = :job_uuid AND attempt = :attempt - 1 AND state = 'scheduled';

-- name: insert_attempt
INSERT INTO attempts (job_uuid, attempt, run_dir, device, launched_at, resume_from, step, start_step)
VALUES (:job_uuid, :attempt, :run_dir, :device, :now, :resume_from, :resume_step, :resume_step);

-- name: advance_cursor
-- The gate of apply_events: events of an attempt that is not the current one, or that were read before, stay out.
UPDATE attempts SET event_offset = :offset
WHERE job_uuid = :job_uuid AND attempt = :attempt AND event_offset < :offset
  AND EXISTS (SELECT 1 FROM jobs WHERE jobs.job_uuid = :job_uuid AND jobs.attempt = :attempt
              AND state NOT IN ('completed', 'failed', 'cancelled'));

-- name: note_started
-- `started`: launching -> in_progress; a job that is being cancelled stays so.
UPDATE jobs SET started_at = coalesce(started_at, :time), detail = '',
       state = CASE state WHEN 'launching' THEN 'in_progress' ELSE state END
WHERE job_uuid = :job_uuid AND attempt = :attempt;

-- name: note_attempt_started
UPDATE attempts SET started_at = :time WHERE job_uuid = :job_uuid AND attempt = :attempt;

-- name: note_prepared
-- It may resume from another checkpoint than it was given, or from the start, where that one is damaged.
UPDATE attempts SET prepared = :event, prepared_at = :time, total_steps = :total_steps, start_step = :start_step,
       step = :start_step,
       resume_from = CASE WHEN :start_step = 0 THEN NULL ELSE coalesce(:resumed_from, resume_from) END
WHERE job_uuid = :job_uuid AND attempt = :attempt;

-- name: supersede_points
-- Steps that an earlier attempt did beyond the checkpoint are done again; what it measured there no longer counts.
DELETE FROM points WHERE job_uuid = :job_uuid AND attempt < :attempt AND step > :start_step;

-- name: supersede_samples
-- As supersede_points. Those after the last step are taken again.
DELETE FROM samples WHERE job_uuid = :job_uuid AND attempt < :attempt AND (step > :start_step OR kind = 'after');

-- name: note_progress
-- A value that `progress` lacks stays as an earlier point had it; one that is null there is removed.
UPDATE attempts SET step = :step, stepped_at = :time, progress = json_patch(progress, :progress)
WHERE job_uuid = :job_uuid AND attempt = :attempt;

-- name: count_tokens
-- Before `note_tokens`. Steps that an earlier attempt did count once.
INSERT INTO totals
SELECT 'tokens', json_array(CASE WHEN json_valid(spec) THEN coalesce(json_extract(spec, '$.train.method.algorithm'), '') ELSE '' END),
       :tokens - tokens
FROM jobs WHERE job_uuid = :job_uuid AND tokens < :tokens
ON CONFLICT (name, labels) DO UPDATE SET value = value + excluded.value;

-- name: note_tokens
UPDATE jobs SET tokens = :tokens WHERE job_uuid = :job_uuid AND tokens < :tokens;

-- name: count
INSERT INTO totals VALUES (:name, :labels, :value)
ON CONFLICT (name, labels) DO UPDATE SET value = value + excluded.value;

-- name: select_wait
-- How long a job has waited for its first attempt, since it waits for no other job.
SELECT :now - max(scheduled_at, not_before) AS seconds FROM jobs WHERE job_uuid = :job_uuid;

-- name: select_totals
SELECT name, labels, value FROM totals;

-- name: select_running
-- What the jobs in states.ACTIVE report of themselves.
SELECT job_uuid, CASE WHEN json_valid(spec)
           THEN coalesce(json_extract(spec, '$.work.kind'), json_extract(spec, '$.train.method.algorithm'), '') ELSE '' END AS algorithm,
       jobs.device AS places, step, total_steps, progress
FROM jobs JOIN attempts USING (job_uuid, attempt)
WHERE state IN ('launching', 'in_progress', 'pausing', 'cancelling') ORDER BY age;

-- name: select_maker
-- A job that has not ended, and whose answers are to become a dataset of this name.
SELECT job_uuid FROM jobs WHERE state NOT IN ('completed', 'failed', 'cancelled') AND job_uuid != :other_than AND json_valid(spec)
    AND json_extract(spec, '$.work.output_dataset_id') = :dataset_id ORDER BY age LIMIT 1;

-- name: note_tokenizing
UPDATE attempts SET progress = json_patch(progress, :progress) WHERE job_uuid = :job_uuid AND attempt = :attempt;

-- name: note_finished
-- A job that stops early ends at its last step all the same. A merge, and an evaluation without checks, report no step before.
UPDATE attempts SET finished = 1, total_steps = min(total_steps, :step), step = max(step, coalesce(min(total_steps, :step), 0))
WHERE job_uuid = :job_uuid AND attempt = :attempt;

-- name: note_result
-- Of a job that does not train: beside what it has reported at its beginning.
UPDATE attempts SET prepared = json_set(prepared, '$.result', json(:result))
WHERE job_uuid = :job_uuid AND attempt = :attempt AND prepared IS NOT NULL;

-- name: note_paused
UPDATE attempts SET paused_at_step = :step WHERE job_uuid = :job_uuid AND attempt = :attempt;

-- name: note_failed
-- The first word counts: when one rank fails, the others fail because of it.
UPDATE attempts SET failed = coalesce(failed, :event) WHERE job_uuid = :job_uuid AND attempt = :attempt;

-- name: upsert_point
INSERT INTO points (job_uuid, step, kind, attempt, time, epoch, metrics)
VALUES (:job_uuid, :step, :kind, :attempt, :time, :epoch, :metrics)
ON CONFLICT (job_uuid, step, kind) DO UPDATE
SET attempt = excluded.attempt, time = excluded.time, epoch = excluded.epoch, metrics = excluded.metrics;

-- name: upsert_samples
-- The first 1000 of each kind only: a training may report any number.
INSERT INTO samples (job_uuid, step, kind, attempt, time, epoch, answers)
SELECT :job_uuid, :step, :kind, :attempt, :time, :epoch, :answers
WHERE (SELECT count(*) FROM samples WHERE job_uuid = :job_uuid AND kind = :kind) < 1000
   OR EXISTS (SELECT 1 FROM samples WHERE job_uuid = :job_uuid AND step = :step AND kind = :kind)
ON CONFLICT (job_uuid, step, kind) DO UPDATE
SET attempt = excluded.attempt, time = excluded.time, epoch = excluded.epoch, answers = excluded.answers;

-- name: upsert_checkpoint
INSERT INTO checkpoints (job_uuid, path, attempt, kind, step, epoch, created_at, train_loss, validation_loss, perplexity)
VALUES (:job_uuid, :path, :attempt, :kind, :step, :epoch, :time, :train_loss, :validation_loss, :perplexity)
ON CONFLICT (job_uuid, path) DO UPDATE
SET attempt = excluded.attempt, kind = excluded.kind, step = excluded.step, epoch = excluded.epoch,
    created_at = excluded.created_at, train_loss = excluded.train_loss, validation_loss = excluded.validation_loss,
    perplexity = excluded.perplexity;

-- name: upsert_node
INSERT INTO nodes (name, machine_id, boot_id, report, joined_at, seen_at)
VALUES (:name, :machine_id, :boot_id, :report, :now, :now)
ON CONFLICT (name) DO UPDATE
SET machine_id = excluded.machine_id, boot_id = excluded.boot_id, report = excluded.report, seen_at = excluded.seen_at;

-- name: select_nodes
SELECT * FROM nodes ORDER BY joined_at, name;

-- name: select_node
SELECT * FROM nodes WHERE name = :name;

-- name: note_seen
UPDATE nodes SET seen_at = :now WHERE name = :name;

-- name: change_mode
UPDATE nodes SET mode = :mode WHERE name = :name;

-- name: delete_node
DELETE FROM nodes WHERE name = :name;

-- name: upsert_load
INSERT INTO loads (node, minute, load) VALUES (:node, :minute, :load)
ON CONFLICT (node, minute) DO UPDATE SET load = excluded.load;

-- name: delete_old_loads
DELETE FROM loads WHERE node = :node AND minute < :oldest;

-- name: delete_loads
DELETE FROM loads WHERE node = :name;

-- name: select_loads
SELECT minute, load FROM loads WHERE node = :node AND minute >= :since ORDER BY minute;

-- name: insert_credential
INSERT INTO node_credentials (sha256, node) VALUES (:sha256, :node);

-- name: limit_unused_credentials
-- Of a node whose joins are not answered in time: each try has issued one.
DELETE FROM node_credentials WHERE node = :node AND used = 0 AND revoked = 0 AND number NOT IN (
    SELECT number FROM node_credentials WHERE node = :node AND used = 0 AND revoked = 0
    ORDER BY number DESC LIMIT :most);

-- name: select_credential
SELECT node, used, revoked FROM node_credentials WHERE sha256 = :sha256 AND (expires_at IS NULL OR expires_at > :now);

-- name: select_used_credential
SELECT 1 FROM node_credentials
WHERE node = :node AND used = 1 AND revoked = 0 AND (expires_at IS NULL OR expires_at > :now);

-- name: use_credential
UPDATE node_credentials SET used = 1 WHERE sha256 = :sha256 AND used = 0 AND revoked = 0;

-- name: expire_credentials_before
UPDATE node_credentials SET expires_at = :expires_at
WHERE node = :node AND revoked = 0 AND expires_at IS NULL
  AND number < (SELECT number FROM node_credentials WHERE sha256 = :sha256);

-- name: revoke_credentials
UPDATE node_credentials SET revoked = 1, expires_at = :expires_at WHERE node = :node AND revoked = 0;

-- name: delete_expired_credentials
DELETE FROM node_credentials WHERE expires_at <= :now;

-- name: insert_task
-- Repeated after a crash: the first time counts.
INSERT INTO tasks (task_id, node, job_uuid, attempt, node_rank, places, stage, task_order)
VALUES (:task_id, :node, :job_uuid, :attempt, :node_rank, :places, :stage, :order)
ON CONFLICT (task_id, node) DO NOTHING;

-- name: select_tasks
SELECT * FROM tasks WHERE task_id = :task_id ORDER BY node_rank;

-- name: select_tasks_of_node
SELECT * FROM tasks WHERE node = :node AND gone = 0 ORDER BY task_id;

-- name: select_current_task
-- A task that its node may still send something of: of the current attempt of a job in states.ACTIVE, and not ordered to stop.
SELECT tasks.*, run_dir FROM tasks JOIN jobs USING (job_uuid, attempt) JOIN attempts USING (job_uuid, attempt)
WHERE task_id = :task_id AND node = :node AND gone = 0 AND stage <> 'stop'
  AND state IN ('launching', 'in_progress', 'pausing', 'cancelling');

-- name: select_current_task_of_job
SELECT 1 FROM tasks JOIN jobs USING (job_uuid, attempt)
WHERE node = :node AND job_uuid = :job_uuid AND gone = 0 AND stage <> 'stop'
  AND state IN ('launching', 'in_progress', 'pausing', 'cancelling');

-- name: select_current_task_with_rows
SELECT 1 FROM tasks JOIN jobs USING (job_uuid, attempt)
WHERE node = :node AND gone = 0 AND stage <> 'stop' AND state IN ('launching', 'in_progress', 'pausing', 'cancelling')
  AND EXISTS (SELECT 1 FROM json_tree(task_order, '$.spec.job') WHERE key = 'sha256' AND value = :sha256);

-- name: select_taken
SELECT job_uuid, places FROM tasks WHERE gone = 0;

-- name: advance_task
-- A task that was ordered to stop stays so.
UPDATE tasks SET stage = :stage, task_order = :order
WHERE task_id = :task_id AND node = :node AND stage = :source AND gone = 0;

-- name: stop_tasks
-- Its first ending counts.
UPDATE tasks SET stage = 'stop', ending = coalesce(ending, :ending)
WHERE task_id = :task_id AND (stage <> 'stop' OR ending IS NULL);

-- name: stop_tasks_of_attempt
-- No attempt ends without its tasks.
UPDATE tasks SET stage = 'stop' WHERE job_uuid = :job_uuid AND attempt = :attempt AND stage <> 'stop';

-- name: note_task
UPDATE tasks SET report = :report WHERE task_id = :task_id AND node = :node AND gone = 0 AND report IS NOT :report;

-- name: note_task_gone
UPDATE tasks SET gone = 1 WHERE task_id = :task_id AND node = :node AND gone = 0;

-- name: note_tasks_gone
UPDATE tasks SET gone = 1 WHERE node = :node AND gone = 0;

-- name: forget_tasks
-- Of attempts that have ended everywhere.
DELETE FROM tasks WHERE gone = 1 AND NOT EXISTS (
    SELECT 1 FROM jobs WHERE jobs.job_uuid = tasks.job_uuid AND jobs.attempt = tasks.attempt
    AND state IN ('launching', 'in_progress', 'pausing', 'cancelling'));

-- name: select_unfinished_tasks
SELECT node FROM tasks WHERE job_uuid = :job_uuid AND gone = 0;

-- name: delete_tasks
DELETE FROM tasks WHERE job_uuid = :job_uuid;

-- name: insert_token
INSERT INTO tokens (name, sha256, role, created_at, created_by, expires_at, limits)
VALUES (:name, :sha256, :role, :now, :created_by, :expires_at, :limits)
ON CONFLICT (name) DO NOTHING;

-- name: select_tokens
SELECT * FROM tokens ORDER BY created_at, name;

-- name: note_token_used
UPDATE tokens SET last_used_at = :time WHERE name = :name;

-- name: delete_token
DELETE FROM tokens WHERE name = :name;

-- name: insert_export
INSERT INTO exports (job_uuid, tracker, project, run, key) VALUES (:job_uuid, :tracker, :project, :run, :key);

-- name: select_exports
-- The newest step of a job that has not ended does not count as behind: it is exported once no attempt can add to it.
SELECT exports.*, jobs.state, jobs.scheduled_at,
       (SELECT count(*) FROM (SELECT 1 FROM points WHERE points.job_uuid = exports.job_uuid AND points.step > exports.step
                              AND (jobs.state IN ('completed', 'failed', 'cancelled') OR points.step
                                   < (SELECT max(newest.step) FROM points AS newest WHERE newest.job_uuid = exports.job_uuid))
                              LIMIT 10000)) AS behind
FROM exports JOIN jobs USING (job_uuid) WHERE exports.job_uuid = :job_uuid ORDER BY tracker;

-- name: select_exports_due
-- Exports of some trackers that have points to send, may get some at any moment, or have to be finished.
SELECT exports.*, jobs.state, jobs.scheduled_at, 0 AS behind FROM exports JOIN jobs USING (job_uuid)
WHERE finished = 0 AND tracker IN (SELECT value FROM json_each(:trackers)) AND jobs.attempt > 0
  AND (state NOT IN ('scheduled', 'paused')
       OR EXISTS (SELECT 1 FROM points WHERE points.job_uuid = exports.job_uuid AND points.step > exports.step
                  AND points.step < (SELECT max(newest.step) FROM points AS newest
                                     WHERE newest.job_uuid = exports.job_uuid)))
ORDER BY jobs.age LIMIT :limit;

-- name: select_begun
-- The attempts after one that have begun to train: the last one, and the earliest step that any of them resumed from.
SELECT max(attempt) AS attempt, min(start_step) AS start_step FROM attempts
WHERE job_uuid = :job_uuid AND attempt > :attempt AND prepared IS NOT NULL;

-- name: select_last_step
-- The last step to export: not the newest one of a job that has not ended.
SELECT max(step) AS step FROM points WHERE job_uuid = :job_uuid
  AND (EXISTS (SELECT 1 FROM jobs WHERE jobs.job_uuid = :job_uuid AND state IN ('completed', 'failed', 'cancelled'))
       OR step < (SELECT max(newest.step) FROM points AS newest WHERE newest.job_uuid = :job_uuid));

-- name: restart_export
-- This and the next four name the cursor that they assume: an exporter that lost its lock changes nothing.
UPDATE exports SET generation = generation + 1, attempt = :new_attempt, sent_step = -1, step = -1, position = '{}'
WHERE job_uuid = :job_uuid AND tracker = :tracker AND key = :key AND generation = :generation AND step = :step;

-- name: intend_export
UPDATE exports SET sent_step = :sent_step, attempt = :new_attempt
WHERE job_uuid = :job_uuid AND tracker = :tracker AND key = :key AND generation = :generation AND step = :step;

-- name: accept_export
UPDATE exports SET step = :new_step, position = :new_position, error = ''
WHERE job_uuid = :job_uuid AND tracker = :tracker AND key = :key AND generation = :generation AND step = :step;

-- name: finish_export
UPDATE exports SET finished = 1, error = ''
WHERE job_uuid = :job_uuid AND tracker = :tracker AND key = :key AND generation = :generation AND step = :step;

-- name: fail_export
UPDATE exports SET error = :error
WHERE job_uuid = :job_uuid AND tracker = :tracker AND key = :key AND generation = :generation AND step = :step;

-- name: insert_allocation
INSERT INTO allocations (request_id, pool, nodes, state, requested_for, recorded_at, handle)
VALUES (:request_id, :pool, :nodes, 'wanted', :requested_for, :now, :handle);

-- name: select_allocations
-- Those that have not ended, and those that ended after a time; the oldest first.
SELECT * FROM allocations WHERE ended_at IS NULL OR ended_at > :since ORDER BY recorded_at, request_id;

-- name: change_allocation
UPDATE allocations SET state = :state, message = :message,
    granted_at = CASE :state WHEN 'granted' THEN coalesce(granted_at, :now) ELSE granted_at END,
    ended_at = CASE :state WHEN 'ended' THEN :now END
WHERE request_id = :request_id AND state = :assumed;

-- name: note_allocation
UPDATE allocations SET message = :message WHERE request_id = :request_id AND message <> :message;

-- name: delete_old_allocations
DELETE FROM allocations WHERE ended_at < :oldest;

-- name: select_unfinished
-- Jobs that have not ended, one for each way to write checkpoints; rtrim leaves the directory that theirs lies in.
SELECT min(job_uuid) AS job_uuid, json_extract(spec, '$.source.model') AS model, json_extract(spec, '$.source.revision') AS revision,
       json_extract(spec, '$.compute.dtype') AS dtype,
       coalesce(json_type(spec, '$.lora'), 'null') <> 'null' AS is_adapter,
       coalesce(json_extract(spec, '$.train.merge_adapter'), 0) AS merges, json_extract(spec, '$.work.kind') AS work,
       rtrim(checkpoint_dir, replace(checkpoint_dir, '/', '')) AS directory
FROM jobs WHERE state NOT IN ('completed', 'failed', 'cancelled') AND json_valid(spec)
GROUP BY 2, 3, 4, 5, 6, 7, 8;

-- name: insert_stored_rows
INSERT OR IGNORE INTO stored_rows VALUES (:sha256, :owner, :dataset_id, :bytes);

-- name: delete_unregistered_rows
DELETE FROM stored_rows WHERE sha256 = :sha256 AND owner = :owner AND dataset_id = '';

-- name: select_rows_of_owner
SELECT 1 FROM stored_rows WHERE sha256 = :sha256 AND owner = :owner LIMIT 1;

-- name: select_stored_bytes
SELECT bytes FROM stored_bytes WHERE owner = :owner;

-- name: select_registered_rows
SELECT owner, bytes FROM stored_rows WHERE sha256 = :sha256 AND dataset_id = :dataset_id LIMIT 1;

-- name: delete_registered_rows
DELETE FROM stored_rows WHERE sha256 = :sha256 AND dataset_id = :dataset_id;

-- name: select_rows_mentioned
-- As `select_mentions`.
SELECT 1 FROM jobs WHERE instr(spec, :sha256)
UNION ALL SELECT 1 FROM predecessors JOIN jobs USING (job_uuid) JOIN attempts ON attempts.job_uuid = predecessor
WHERE base IS NOT NULL AND instr(prepared, :sha256) AND state NOT IN ('completed', 'failed', 'cancelled') LIMIT 1;

-- name: select_owner_of_rows
SELECT 1 FROM stored_rows WHERE sha256 = :sha256 LIMIT 1;

-- name: forget_stored_rows
DELETE FROM stored_rows WHERE sha256 = :sha256;

-- name: select_rows_of_datasets
SELECT sha256, dataset_id FROM stored_rows WHERE dataset_id <> '';

-- name: select_rows_of_dataset
SELECT DISTINCT sha256 FROM stored_rows WHERE dataset_id = :dataset_id;

-- name: select_webhooks
SELECT url, state FROM webhooks;

-- name: delete_webhooks
DELETE FROM webhooks;

-- name: insert_webhook
INSERT INTO webhooks (url, state) VALUES (:url, :state);

-- name: delete_other_deliveries
-- Of addresses that are configured no longer.
DELETE FROM webhook_deliveries WHERE url NOT IN (SELECT url FROM webhooks);

-- name: select_next_delivery
SELECT url, job_uuid, state, ended_at, tries,
       max(not_before, coalesce((SELECT rests_until FROM webhook_rests WHERE url = :url), 0)) AS not_before
FROM webhook_deliveries WHERE url = :url ORDER BY webhook_deliveries.not_before, ended_at LIMIT 1;

-- name: count_deliveries
SELECT count(*) AS waiting FROM webhook_deliveries;

-- name: begin_delivery
-- This and the next one name the number of tries that they assume.
UPDATE webhook_deliveries SET tries = tries + 1, not_before = :not_before
WHERE url = :url AND job_uuid = :job_uuid AND tries = :tries;

-- name: delete_delivery
DELETE FROM webhook_deliveries WHERE url = :url AND job_uuid = :job_uuid AND tries = :tries;

-- name: put_rest
INSERT INTO webhook_rests (url, rests_until) VALUES (:url, :rests_until)
ON CONFLICT (url) DO UPDATE SET rests_until = excluded.rests_until;

-- name: delete_rest
DELETE FROM webhook_rests WHERE url = :url;

-- name: delete_other_rests
-- Of addresses that are configured no longer.
DELETE FROM webhook_rests WHERE url NOT IN (SELECT url FROM webhooks);
