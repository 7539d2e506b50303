# make demo: install and train; make test: the tests, in five minutes; make test-cluster: those that start Ray clusters
# of their own, or take long; make bench-check: those of the benchmarks; make test-full: all of them, with whole products
# of settings and ten times as many random examples, and JAX' and Keras' likewise, in some hours; make test-loggers:
# TensorBoard and the other trackers, which it installs; make test-adapters, test-jax, test-tensorflow, test-spark,
# test-sagemaker, test-storage, test-page: Lightning and Hugging Face, JAX, Keras, Spark, SageMaker's toolkit, a server that speaks S3,
# the page of a job in a browser, likewise, and test-site the site of the documentation. With FULL=1 these run their tests that are marked `full`, too, as test-full has them do.
# make check: lint and types, and how long the pages are; make bench: the figures; make soak: ten minutes of training in which most processes die and
# the driver gets signals; make mutants: how many of a hundred small changes of the core the tests without Ray notice, in an hour or two;
# make coverage: all tests, several times as slow, with the lines that they reach. CI runs check, test, test-core-alone, bench-check,
# test-cluster, test-gpu, test-adapters, test-jax, test-tensorflow, test-spark, test-sagemaker, test-storage, site. make test-gpu:
# training on a GPU, or on what stands for one; make test-core-alone: the core's roles without the rest of the package. make package:
# the files of a release, in dist/, checked and used.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST := $(BIN)/python -m pytest
# also where the environment says otherwise: the tests start many processes, which would compile the same modules
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-core-alone test-cluster test-loggers test-adapters test-jax test-tensorflow test-spark test-sagemaker test-storage \
  test-page test-site bench-check test-full test-gpu environments \
  mutants coverage check bench soak package sbom site clean

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e ".[dev]"
	touch $(STAMP)

# Environments of their own, and the extras that each has: they bring tens of packages, up to a gigabyte, that nothing
# else needs, and trackers want other versions of what torch and Ray want. Lightning, Hugging Face, SageMaker's toolkit
# and the server that speaks S3 agree and share one; Spark needs Java 17 or 21, and brings grpcio, with which Ray starts a
# server that the others do not want.
# All find the packages of the tests' own environment after theirs, so that nothing is installed twice; Ray on Spark looks
# for Ray's script beside Python. In all environments modules are compiled when they are imported: most of them never are,
# and compiling all of torch's takes longer than installing them.
EXTRAS-loggers := loggers,opentelemetry
EXTRAS-shared := lightning,transformers,sagemaker,storage-tests
EXTRAS-spark := spark
EXTRAS-jax := jax
EXTRAS-tensorflow := tensorflow
EXTRAS-docs := docs
EXTRAS-page := page
SHARED := $(VENV)-shared/bin/python
# FULL=1 has these targets run the tests that are marked `full`, too
FULL :=
CHOICE := $(if $(FULL),full or not full,not full)

PACKAGES := import sysconfig; print(sysconfig.get_path('purelib'))

$(VENV)-%/.installed: $(STAMP)
	test -e $@ || $(PYTHON) -m venv --clear $(@D)  # also after an install that was interrupted
	echo "import site; site.addsitedir('$$($(BIN)/python -c "$(PACKAGES)")')" \
	  > "$$($(@D)/bin/python -c "$(PACKAGES)")/of_the_tests.pth"
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt \
	  -e ".[dev,$(EXTRAS-$*)]"
	test -e $(@D)/bin/ray || ln -s "$(abspath $(BIN)/ray)" $(@D)/bin/ray
	touch $@

# those of what CI runs, installed for later
environments: $(foreach name,shared jax tensorflow spark docs,$(VENV)-$(name)/.installed)

test-loggers: $(VENV)-loggers/.installed
	$(VENV)-loggers/bin/python -m pytest -m "cluster or not cluster" tests/observe/test_real_loggers.py tests/observe/test_loggers.py tests/observe/test_open_telemetry.py \
	  tests/places/test_kuberay_probes.py

test-adapters: $(VENV)-shared/.installed
	$(SHARED) -m pytest -m "$(CHOICE)" tests/adapters/test_lightning.py tests/adapters/test_hugging_face.py

# compiled once for all tests and their processes, and for those of the next time
test-jax: export JAX_COMPILATION_CACHE_DIR = $(abspath $(VENV)-jax/compiled)
test-jax: export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS = 0
test-jax: export JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES = -1
test-jax: $(VENV)-jax/.installed
	$(VENV)-jax/bin/python -m pytest -m "$(CHOICE)" --numprocesses=2 -k "jax or flax or optax" \
	  tests/adapters/test_jax_*.py tests/models/test_models.py tests/project/test_docs.py tests/project/test_imports.py

# needs a Chromium (apt-get install chromium-headless-shell); CHROMIUM=path names another than that on the path
test-page: $(VENV)-page/.installed
	$(VENV)-page/bin/python -m pytest -m "cluster or not cluster" tests/observe/test_page_in_browser.py

# needs a Chromium too
test-site: site
	$(VENV)-docs/bin/python -m pytest tests/project/test_site_in_browser.py

test-storage: $(VENV)-shared/.installed
	$(SHARED) -m pytest -m "$(CHOICE)" tests/checkpoint/test_s3_storage.py

test-tensorflow: $(VENV)-tensorflow/.installed
	$(VENV)-tensorflow/bin/python -m pytest -m "$(CHOICE)" --numprocesses=2 tests/adapters/test_keras_*.py

test-sagemaker: $(VENV)-shared/.installed
	$(SHARED) -m pytest -m "$(CHOICE)" tests/places/test_sagemaker_toolkit.py

test-spark: $(VENV)-spark/.installed
	$(VENV)-spark/bin/python -m pytest -m "$(CHOICE)" --numprocesses=2 --dist=loadfile \
	  $(addprefix tests/places/test_,spark_standalone.py spark_executors.py spark.py parquet_rows.py)  # the longest first

demo: $(STAMP)
	$(BIN)/steepest demo

test: $(STAMP)
	$(PYTEST) -m "not ray and not cluster and not long" --numprocesses=2 --ignore=tests/gpu
	$(PYTEST) -m "ray and not cluster and not long"

# on a GPU, or where there is none on a device of torch's that stands for one, which a C++ compiler makes once
test-gpu: export TORCH_EXTENSIONS_DIR = $(abspath $(VENV))/torch_extensions
test-gpu: $(STAMP)
	$(PYTEST) -m "$(CHOICE)" --numprocesses=2 tests/gpu

test-core-alone: $(STAMP)
	$(BIN)/python tests/core/alone.py --numprocesses=2 $(if $(FULL),,-m "not long")

test-cluster: $(STAMP)
	$(PYTEST) -m "long and not ray and not cluster" --numprocesses=2 --ignore=tests/gpu
	$(PYTEST) -m "cluster or long and ray"

bench-check: $(STAMP)
	$(PYTEST) -m "not long" benchmarks/tests

test-full: $(STAMP)
	$(PYTEST) --hypothesis-profile=full -m "(full or not full) and not ray and not cluster" --numprocesses=2
	$(PYTEST) --hypothesis-profile=full -m "(full or not full) and (ray or cluster)"
	$(PYTEST) benchmarks/tests
	$(MAKE) FULL=1 test-core-alone test-adapters test-jax test-tensorflow test-spark test-sagemaker test-storage

mutants: $(STAMP)
	$(BIN)/python tests/mutants.py --count 100 --seed 14 --results mutants.json

coverage: $(STAMP)
	$(PYTEST) --cov --cov-report=term

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m release.word_counts

bench: $(STAMP)
	$(BIN)/python -m benchmarks.overhead

soak: $(STAMP)
	$(BIN)/python -m benchmarks.soak --minutes 10

# for a release that is published, REPOSITORY=https://host/owner/name REF=v0.1.0
package: $(STAMP)
	$(BIN)/python -m release.package $(if $(REPOSITORY),--repository "$(REPOSITORY)") $(if $(REF),--ref "$(REF)")

sbom: $(STAMP)
	$(BIN)/python -m release.bill_of_materials

site: $(VENV)-docs/.installed
	$(VENV)-docs/bin/python -m release.site $(if $(REPOSITORY),--repository "$(REPOSITORY)")

clean:
	rm -rf $(VENV) $(VENV)-loggers $(VENV)-jax $(VENV)-tensorflow $(VENV)-shared $(VENV)-spark $(VENV)-docs $(VENV)-page build dist *.egg-info \
	  .mypy_cache .ruff_cache .pytest_cache .hypothesis
