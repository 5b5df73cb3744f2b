"""Runs in the virtual environment of aws-parallelcluster: what its schema and its validators say about documents.

Reads from stdin a JSON object, name -> text of a configuration, and writes one: name -> [[level, validator, message]].
The validators ask moto instead of AWS, where there are two subnets and the key pair `my-key`.
"""

import json
import os
import sys

os.environ.update(AWS_DEFAULT_REGION="us-east-2", AWS_ACCESS_KEY_ID="x", AWS_SECRET_ACCESS_KEY="x",
                  AWS_EC2_METADATA_DISABLED="true")  # fmt: skip

import boto3
import yaml
from marshmallow import ValidationError
from moto import mock_aws
from pcluster.aws.common import AWSClientError
from pcluster.schemas.cluster_schema import ClusterSchema

SUBNETS = ("subnet-0123456789abcdef0", "subnet-0fedcba9876543210")


def judge(text, image):
    try:
        config = ClusterSchema(cluster_name="test").load(yaml.safe_load(text))
    except ValidationError as error:
        return [["ERROR", "schema", json.dumps(error.messages)]]
    config.official_ami = image
    try:
        return [[each.level.name, each.validator_type, each.message] for each in config.validate()]
    except AWSClientError as error:
        return [["ERROR", "EC2", str(error)]]


with mock_aws():
    ec2 = boto3.client("ec2")
    vpc = ec2.create_vpc(CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"]
    for name in ("EnableDnsHostnames", "EnableDnsSupport"):
        ec2.modify_vpc_attribute(VpcId=vpc, **{name: {"Value": True}})
    made = [ec2.create_subnet(VpcId=vpc, CidrBlock=f"10.0.{n}.0/24", AvailabilityZone="us-east-2a") for n in (1, 2)]
    ec2.create_key_pair(KeyName="my-key")
    image = ec2.describe_images()["Images"][0]["ImageId"]
    found = {}
    for name, text in json.load(sys.stdin).items():
        for subnet, answer in zip(SUBNETS, made, strict=True):
            text = text.replace(subnet, answer["Subnet"]["SubnetId"])
        found[name] = judge(text, image)
json.dump(found, sys.stdout)
